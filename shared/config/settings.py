"""What a service is told by its environment. Every name starts with UNIMESH_."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from shared.config.problems import bad
from shared.files import place

T = TypeVar("T", int, float)
ADDRESSES = ("url", "base_url")
"""Parameters of scorers that hold an address."""


def _below(url: str, legal: str) -> bool:
    """Whether an address has the scheme, host and port of another, and a path at or below its."""
    asked, known = urlsplit(url), urlsplit(legal)
    if (asked.scheme, asked.netloc.lower()) != (known.scheme, known.netloc.lower()):
        return False  # user names in an address make it another one
    path = known.path.rstrip("/")
    return ".." not in asked.path.split("/") and (asked.path.rstrip("/") == path or asked.path.startswith(f"{path}/"))


@dataclass(frozen=True)
class Settings:
    redis_url: str
    state: Path
    """Folder for weights, checkpoints and bodies; shared by the job's services."""
    roots: tuple[Path, ...]
    """Paths that come over HTTP must lie below one of these."""
    bodies: str
    """Body store URL (see shared.wire.bodies.open_bodies)."""
    threads: int
    """CPU threads of a child that computes."""
    logs: Path | None
    """Folder for the children's output; None: this process's own."""
    lease_s: float = 15.0
    """How long a silent worker keeps what it holds: leases on messages, on jobs, and its registration follow it."""
    tokens: Path | None = None
    """File of the HTTP API's bearer tokens; None: none is asked for, which is legal on loopback only."""
    most_request_bytes: int = 16 << 20
    scorer_urls: tuple[str, ...] = ()
    """Scorers that ask others may ask only what begins with one of these; empty: anything."""
    otlp: str | None = None
    """Base address of an OpenTelemetry collector (OTLP over HTTP) that gets spans; None: nobody does."""
    score: str | None = None
    """`host:port` where the reward service answers `POST /score`; None: it does not."""
    token: str | None = None
    """A token of the HTTP API with every right, besides those of the file: how a container is told its one."""
    health: str | None = None
    """`host:port` where an agent tells of its progress; None: nowhere."""
    hang_s: float = 600.0
    """An agent starts a child again that has shown no progress for so long."""
    devices: str = "auto"
    """The devices that agents may lease (see shared.agent.devices)."""
    device_count: int | None = None
    """How many devices an agent leases; None: what its service usually needs, where the host has devices."""
    device_share: int = 1
    """Agents that may hold the same device; they must take turns, as synchronous training does."""

    store: str | None = None
    """Where versions of weights are kept if not in the state folder: a folder, or a URL that fsspec knows."""

    def weights(self, job: str) -> Path:
        return self.state / "jobs" / job / "weights" if self.store is None else place(self.store) / job

    @property
    def fetched(self) -> Path:
        """Copies of what is kept elsewhere, for what reads files of this host."""
        return self.state / "fetched"

    def checkpoints(self, job: str) -> Path:
        return self.state / "jobs" / job / "checkpoints"

    def base(self, job: str) -> Path:
        """Versions of other jobs that this one starts from."""
        return self.state / "jobs" / job / "base"

    def exports(self, job: str) -> Path:
        return self.state / "jobs" / job / "exports"

    def records(self, job: str) -> Path:
        return self.state / "jobs" / job / "samples.sqlite"

    def previews(self, job: str) -> Path:
        return self.state / "jobs" / job / "previews"

    def tracking(self, job: str) -> Path:
        return self.state / "jobs" / job / "tracking"

    def check_urls(self, params: Mapping[str, Any], at: str) -> None:
        """BadInput for a component whose address leads where scorers may not ask."""
        for name in ADDRESSES:
            url = params.get(name)
            if isinstance(url, str) and self.scorer_urls and not any(_below(url, legal) for legal in self.scorer_urls):
                raise bad(f"{at}.{name}", url, "scorers may not ask there", f"what lies below {', '.join(self.scorer_urls)}")

    def allowed(self, path: str, field: str) -> Path:
        """The path, resolved; BadInput unless it exists below a configured root."""
        found = Path(path).expanduser().resolve()
        if not any(found.is_relative_to(root) for root in self.roots):
            legal = ", ".join(map(str, self.roots)) or "none (set UNIMESH_ROOTS)"
            raise bad(field, path, "not below a configured root", f"paths below {legal}")
        if not found.exists():
            raise bad(field, path, "does not exist")
        return found


def child_threads(document: dict[str, Any], settings: Settings) -> int:
    """CPU threads of a rollout or trainer child: the recipe's, else the host's; halved where both compute at once."""
    given = document["recipe"]["placement"]["threads"]
    if given is not None:
        return int(given)
    overlaps = document["plan"].get("max_staleness", 0) > 0
    return max(1, settings.threads // 2) if overlaps else settings.threads


def _number(name: str, default: T, least: T) -> T:
    """A number of the environment, of the default's kind; empty means the default."""
    value = os.environ.get(name, "")
    kind: Any = type(default)
    try:
        found: T = kind(value) if value else default
    except ValueError:
        found = least - 1
    if not found >= least:
        raise SystemExit(f"{name}={value!r}: must be a {'whole ' if kind is int else ''}number, at least {least}")
    return found


def from_environment() -> Settings:
    """SystemExit names the variable that cannot be."""
    state = Path(os.environ.get("UNIMESH_STATE", ".unimesh")).resolve()
    roots = tuple(Path(p).resolve() for p in os.environ.get("UNIMESH_ROOTS", "").split(os.pathsep) if p)
    logs = os.environ.get("UNIMESH_LOGS")
    return Settings(
        redis_url=os.environ.get("UNIMESH_REDIS_URL", "redis://127.0.0.1:6379/0"),
        state=state,
        store=os.environ.get("UNIMESH_WEIGHTS") or None,
        roots=(*roots, state),
        bodies=os.environ.get("UNIMESH_BODIES", f"dir:{state / 'bodies'}"),
        threads=_number("UNIMESH_THREADS", 0, 0) or max(1, os.cpu_count() or 1),
        logs=Path(logs) if logs else None,
        lease_s=_number("UNIMESH_LEASE_S", 15.0, 0.1),
        tokens=Path(tokens) if (tokens := os.environ.get("UNIMESH_TOKENS")) else None,
        scorer_urls=tuple(url for url in os.environ.get("UNIMESH_SCORER_URLS", "").split(",") if url),
        otlp=os.environ.get("UNIMESH_OTLP") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None,
        score=os.environ.get("UNIMESH_SCORE") or None,
        token=os.environ.get("UNIMESH_TOKEN") or None,
        health=os.environ.get("UNIMESH_HEALTH") or None,
        hang_s=_number("UNIMESH_HANG_S", 600.0, 1.0),
        devices=os.environ.get("UNIMESH_DEVICES") or "auto",
        device_count=_number("UNIMESH_DEVICE_COUNT", 0, 0) if os.environ.get("UNIMESH_DEVICE_COUNT") else None,
        device_share=_number("UNIMESH_DEVICE_SHARE", 1, 1),
        most_request_bytes=_number("UNIMESH_MOST_REQUEST_BYTES", 16 << 20, 1024),
    )
