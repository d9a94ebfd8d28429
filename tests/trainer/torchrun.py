"""Ranks as torchrun starts them, on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def run(module: str, arguments: Sequence[str], ranks: int = 2, nodes: int = 1) -> None:
    """Until all ranks of a module have ended well. Several `nodes` meet over c10d, each with its share of the ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks // nodes)]
    if nodes == 1:
        command.append("--standalone")
    else:
        where = f"127.0.0.1:{free_port()}"
        command += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", where]
        command += ["--local-addr", "127.0.0.1"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([*command, "-m", module, *arguments], env=env) for _ in range(nodes)]
    try:
        assert [process.wait(150) for process in processes] == [0] * nodes
    finally:
        for process in processes:
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
