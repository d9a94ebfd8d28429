"""What agents say of themselves, and what the controller assigns to them."""

from __future__ import annotations

from typing import Literal

import msgspec

Service = Literal["rollout", "reward", "trainer"]
BEAT_S = 0.5
"""Between two beats of an agent; a registration that is not renewed for 0.4 leases is gone."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout or trainer agent is to run. `id` is random: a child belongs to exactly one assignment."""

    id: str
    job: str
    role: Service
    track: str


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's registration."""

    name: str
    service: Service
    host: str
    pid: int
    since: float
    state: Literal["waiting", "idle", "working", "draining"] = "idle"
    """`waiting`: for a device to become free; it gets no job meanwhile."""
    job: str = ""
    assignment: str = ""
    child: int = 0
    """Pid of its child; 0: none."""
    restarts: int = 0
    error: str = ""
    """Why the last child ended; empty if none failed."""
    components: tuple[str, ...] = ()
    """Engines, scorers or algorithms that it can run."""
    threads: int = 1
    devices: tuple[str, ...] = ()
    """UUIDs of the devices that it leases; its child sees them alone."""
    storage: str = ""
    """Of its state and body folders: services that work for one job must have the same."""
    beat: float = 0.0
    """time.time() of the last beat."""
