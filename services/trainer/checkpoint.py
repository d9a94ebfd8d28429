"""The tensors of a checkpoint: each rank writes its own shards beside training, and any number of ranks reads them.

`torch.distributed.checkpoint` in its safetensors form, so nothing is pickled in a file; what is no tensor is JSON beside it.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from services.trainer.world import World
from shared.files import when_there_is_space
from shared.weights import checkpoints
from shared.weights.checkpoints import Position

warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")  # one rank needs none

TENSORS = "tensors"
"""Folder of the shards in a checkpoint."""
SETTINGS_FILE = "settings.json"


class State(NamedTuple):
    """What a checkpoint holds of a stack: live tensors by name, on each rank its shards, and what is no tensor."""

    tensors: dict[str, Tensor]
    settings: dict[str, Any]


class Saver:
    """Copies the state into host memory, and writes it in a thread while training goes on; one checkpoint at a time.

    The threads of all ranks write in step, rank 0's completes the checkpoint. Waits for: the ranks' files, a full disk.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        keep: int = 2,
        keep_every: int = 0,
        background: bool = True,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """
        Args:
            keep: the newest so many stay, and those whose step `keep_every` divides.
            background: False: save() returns when the checkpoint is complete.
            say: tells people why it takes so long.
        """
        self.folder, self.world, self.keep, self.keep_every = folder, world, keep, keep_every
        self.background, self.say = background, say
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def save(
        self,
        position: Position,
        state: State,
        files: Mapping[str, bytes],
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """All ranks must call it, at the same position.

        Args:
            files: rank 0's, beside the tensors.
            before, after: rank 0 calls them before and after the checkpoint becomes complete.
        """
        self.wait()
        if self.world.first:
            when_there_is_space(lambda: checkpoints.begin(self.folder, position), self.say)
        self.world.barrier()
        copy = DefaultStager(StagingOptions(False, False, False, False)).stage(state.tensors)
        own = {SETTINGS_FILE: json.dumps(state.settings).encode(), **files}

        def run() -> None:
            try:
                when_there_is_space(lambda: self._write(position, copy), self.say)  # every rank, again if one has no space
                if self.world.first:
                    when_there_is_space(lambda: self._complete(position, own, before), self.say)
                    after()
                    checkpoints.prune(self.folder, self.keep, self.keep_every)
            except BaseException as error:  # whatever it was, the trainer's own thread raises it
                self.error = error

        self.thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self.thread.start()
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. Raises what writing raised."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.check()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def _write(self, position: Position, copy: Any) -> None:
        place = checkpoints.aside(self.folder, position)
        writer = HuggingFaceStorageWriter(str(place / TENSORS), save_distributed=True)
        try:
            state_dict_saver.save(copy, storage_writer=writer, process_group=self.world.saving, no_dist=self.world.size == 1)
        except CheckpointException as error:
            raise RuntimeError(str(error)) from error

    def _complete(self, position: Position, files: Mapping[str, bytes], before: Callable[[], None]) -> None:
        for name, data in files.items():
            (checkpoints.aside(self.folder, position) / name).write_bytes(data)
        before()
        checkpoints.complete(self.folder, position)


def load(folder: Path, tensors: dict[str, Tensor], world: World) -> dict[str, Any]:
    """Fills these tensors in place, on every rank its shards; returns the settings. ValueError names what does not fit."""
    reader = HuggingFaceStorageReader(str(folder / TENSORS))
    try:
        state_dict_loader.load(tensors, storage_reader=reader, process_group=world.saving, no_dist=world.size == 1)
    except CheckpointException as error:
        raise ValueError(f"checkpoint {folder.name} does not fit: {error}") from error
    settings: dict[str, Any] = json.loads((folder / SETTINGS_FILE).read_text())
    return settings


def read(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, whole and by the rest of their names, without any ranks."""
    reader = HuggingFaceStorageReader(str(folder / TENSORS))
    known: Any = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in known.items() if name.startswith(prefix)
    }
    state_dict_loader.load(found, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): value for name, value in found.items()}
