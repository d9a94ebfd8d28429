"""The `transformers` engine: a thread that gathers what was submitted and generates it in batches of like length."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.rollout.engines.base import Done, Outcome, Slice
from shared.config.builtin import Engine as EngineParams
from shared.models.ar.bundle import Bundle, assign
from shared.models.ar.generate import Completion, generate
from shared.models.ar.philox import sample_seed
from shared.models.tensors import decode
from shared.types.params import ARSamplingParams
from shared.types.part import Text
from shared.types.sample import Sample
from shared.types.segments import TextSegment
from shared.wire.codec import Buffer

State = dict[str, Tensor]
PROBE_TOKENS = 12
HAND_OVER_S = 0.02
"""Slices that end within so long are handed over together: handing over takes CPU time from the rows that go on."""


class Item(NamedTuple):
    samples: Slice
    alone: bool
    place: int
    """Among those submitted with it."""
    done: Done


class TransformersEngine:
    def __init__(self, bundle: Bundle, params: EngineParams) -> None:
        self.bundle, self.params = bundle, params
        self.version = -1
        self.queue: SimpleQueue[list[Item] | None] = SimpleQueue()
        self.waiting: list[Item] = []
        self.progress = time.monotonic()
        self.quiet = threading.Condition()
        self.running = 0
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def submit(self, slices: Sequence[Slice], done: Done, alone: bool = False) -> None:
        with self.quiet:
            self.running += len(slices)
        self.queue.put([Item(samples, alone, place, done) for place, samples in enumerate(slices)])

    def capacity(self) -> int:
        return self.params.max_batch_rows

    def load(self, files: Sequence[tuple[str, Buffer]]) -> State:
        found = [decode(data) for name, data in files if name.endswith(".safetensors")]
        return {name: value for tensors in found for name, value in tensors.items()}

    def adopt(self, track: str, version: int, loaded: State) -> None:
        with self.quiet:
            self.quiet.wait_for(lambda: self.running == 0)
        assign(self.bundle.model, loaded)
        self.version = version

    @torch.no_grad()
    def probe(self) -> float | None:
        if self.running:
            return None
        size = self.bundle.model.get_input_embeddings().num_embeddings
        tokens = torch.arange(PROBE_TOKENS, device=self.bundle.model.device) * 7919 % size
        log_probs = self.bundle.model(tokens[None]).logits[0].double().log_softmax(-1)
        return float(log_probs[:-1].gather(1, tokens[1:, None]).sum())

    def progressed(self) -> float:
        return self.progress

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join(5)

    # the engine's thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Waits for a submit, then `batch_wait_ms` for more like it."""
        while (batch := self._gather()) is not None:
            self.progress = time.monotonic()
            open_items = dict(enumerate(batch))
            try:
                self._generate(batch, open_items)
            except Exception as error:  # the thread's outer loop: whatever a model raises belongs to these slices
                _tell([(item, error) for item in open_items.values()])
            with self.quiet:
                self.running -= len(batch)
                self.quiet.notify_all()

    def _gather(self) -> list[Item] | None:
        if not self.waiting:
            first = self.queue.get()
            if first is None:
                return None
            self.waiting += first
        deadline = time.monotonic() + self.params.batch_wait_ms / 1000
        while sum(_rows(item.samples) for item in self.waiting) < self.params.max_batch_rows:
            try:
                items = self.queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            if items is None:
                self.queue.put(None)
                break
            self.waiting += items
        return self._choose()

    def _choose(self) -> list[Item]:
        """The oldest slice and those that may share its batch: equal parameters, like lengths, within the row limit."""
        head = self.waiting[0]
        if head.alone:
            return [self.waiting.pop(0)]
        key, length = _batch_key(head.samples), _length(head.samples)
        chosen: list[Item] = []
        rows = 0
        for item in self.waiting:
            alike = not item.alone and _batch_key(item.samples) == key
            own, size = _length(item.samples), _rows(item.samples)
            near = max(length, own) <= self.params.length_bucket * min(length, own) + 8
            if alike and near and (not chosen or rows + size <= self.params.max_batch_rows):
                chosen.append(item)
                rows += size
        taken = {id(item) for item in chosen}
        self.waiting = [item for item in self.waiting if id(item) not in taken]
        return chosen

    def _generate(self, batch: list[Item], open_items: dict[int, Item]) -> None:
        """Slices go out soon after their rows have ended: their rewards are computed while others are still generated."""
        samples = [sample for item in batch for sample in item.samples]
        owner = [place for place, item in enumerate(batch) for s in item.samples for _ in s.frontier.sample_ids]
        first = [owner.index(place) for place in range(len(batch))]
        missing = [_rows(item.samples) for item in batch]
        completions: dict[int, Completion] = {}
        held: list[tuple[Item, Outcome]] = []
        since = 0.0

        def hand_over() -> None:
            _tell(held)
            held.clear()

        def ended(row: int, completion: Completion) -> None:
            nonlocal since
            completions[row] = completion
            place = owner[row]
            missing[place] -= 1
            if not missing[place]:
                rows = iter(range(first[place], len(owner)))
                found = [self._fill(s, [completions[next(rows)] for _ in s.frontier.sample_ids]) for s in batch[place].samples]
                since = since if held else time.monotonic()
                held.append((open_items.pop(place), found))

        params = samples[0].frontier.sampling_params
        if not isinstance(params, ARSamplingParams):
            raise ValueError(f"the transformers engine cannot do {type(params).__name__}")
        prompts: dict[bytes, int] = {}
        tokens: list[np.ndarray[Any, Any]] = []
        rows: list[int] = []
        seeds: list[int] = []
        for sample in samples:
            for row, sample_id in enumerate(sample.frontier.sample_ids):
                prompt = sample.conditioning(row)
                place = prompts.setdefault(prompt.tobytes(), len(prompts))
                if place == len(tokens):
                    tokens.append(prompt)
                rows.append(place)
                seeds.append(sample_seed(params.seed, sample_id))

        def tick() -> None:
            self.progress = time.monotonic()
            if held and self.progress - since > HAND_OVER_S:
                hand_over()

        generate(self.bundle, tokens, rows, seeds, params, tick, ended)
        hand_over()

    def _fill(self, sample: Sample, completions: list[Completion]) -> Sample:
        texts = self.bundle.tokenizer.decode_batch([c.tokens for c in completions], skip_special_tokens=True)
        segment = TextSegment(
            tokens=np.asarray([t for c in completions for t in c.tokens], np.int32),
            lengths=np.asarray([len(c.tokens) for c in completions], np.int32),
            log_probs=np.asarray([p for c in completions for p in c.log_probs], np.float32),
            finish_reasons=tuple(c.finish for c in completions),
        )
        return sample.fill(
            segment,
            primitives={"text": tuple(map(Text, texts))},
            status=tuple("ok" if c.finish == "stop" else "truncated" for c in completions),
            output_version=np.full(len(completions), self.version, np.int64),
        )


def _tell(outcomes: Sequence[tuple[Item, Outcome]]) -> None:
    """Those that were submitted together hear of their slices together."""
    by_call: dict[int, tuple[Done, list[tuple[int, Outcome]]]] = {}
    for item, outcome in outcomes:
        by_call.setdefault(id(item.done), (item.done, []))[1].append((item.place, outcome))
    for done, found in by_call.values():
        done(found)


def _rows(samples: Slice) -> int:
    return sum(len(s.frontier) for s in samples)


def _length(samples: Slice) -> int:
    """Longest prompt, by its Parts' tokens."""
    return max(int(s.parts[0].text_segment.lengths.max()) for s in samples)


def _batch_key(samples: Slice) -> object:
    return samples[0].frontier.sampling_params
