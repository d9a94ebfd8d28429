"""The other ranks of a trainer on this host: processes that rank 0 starts and watches. One that ends takes all along."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from shared.agent.process import PARENT

log = logging.getLogger(__name__)

FAILED, LOST = 3, 4
"""Exit codes: an error of the rank's own, which ends the job; another rank is gone, so that all begin again."""
GONE_S = 3.0
"""From an error that another rank's end made to one's own: rank 0 hears first what it died of."""
WORDS = "UNIMESH_RANK_WORDS"
"""Environment variable: the file in which a rank says what it died of."""


def lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or late; gloo says it in a plain RuntimeError."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def ranks_said(text: str) -> None:
    """For rank 0, which tells it."""
    if place := os.environ.get(WORDS):
        Path(place).write_text(text)


class Others:
    """Ranks 1 … n-1, by torchrun's environment contract. Waits for: their end. `fail` is told what one of them died of."""

    def __init__(self, ranks: int, order: str) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its port is taken before it is told
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.store.port), WORLD_SIZE=str(ranks))
        os.environ.update(RANK="0", LOCAL_RANK="0", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        self.fail: Callable[[str], None] = log.error
        self.folder = tempfile.TemporaryDirectory()
        self.processes = {rank: self._start(rank, order) for rank in range(1, ranks)}
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _start(self, rank: int, order: str) -> subprocess.Popen[bytes]:
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "UNIMESH_ORDER": order,
            PARENT: str(os.getpid()),
            WORDS: str(self._words(rank)),
        }
        return subprocess.Popen([sys.executable, "-m", "services.trainer.child"], env=env)

    def _words(self, rank: int) -> Path:
        return Path(self.folder.name) / f"rank-{rank}"

    def _watch(self) -> None:
        while True:
            time.sleep(0.5)
            ended = {rank: process.poll() for rank, process in self.processes.items()}
            bad = {rank: code for rank, code in ended.items() if code not in (None, 0, LOST)}
            for rank, code in bad.items():
                if code == FAILED and self._words(rank).exists():
                    self.fail(f"rank {rank}: {self._words(rank).read_text()}")
            if bad or LOST in ended.values():
                log.error("ranks have ended with %s; ending all", bad or ended)
                self.folder.cleanup()
                os.kill(os.getpid(), signal.SIGKILL)

    def wait(self) -> None:
        """Until they have ended as they should."""
        for process in self.processes.values():
            process.wait(30)
        self.folder.cleanup()
