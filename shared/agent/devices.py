"""Devices (GPUs) of this host, and who holds them: a lease in Redis by UUID, taken before anything imports torch.

Every service may see all devices of its host; what an agent leases is what its child sees (CUDA_VISIBLE_DEVICES). So agents
come and go, and are scaled, without anybody writing device numbers down.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from shared.wire import keys
from shared.wire.scripts import Scripts

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Device:
    uuid: str
    name: str = ""
    memory_mb: int = 0
    """0: not known."""


Lister = Callable[[], Sequence[Device]]


def list_devices(setting: str = "auto", env: Mapping[str, str] = os.environ) -> list[Device]:
    """The devices that agents of this host may lease.

    `setting`: `auto` asks NVIDIA's management library (no driver: no devices) and keeps to CUDA_VISIBLE_DEVICES if that is set;
    `none`; or UUIDs with commas between them, which are taken as they are (parts of a device, MIG, have UUIDs too).
    """
    if setting == "none":
        return []
    if setting != "auto":
        return [Device(uuid.strip()) for uuid in setting.split(",") if uuid.strip()]
    found = _nvml()
    visible = env.get(VISIBLE)
    if visible is None:
        return found
    chosen = []
    for word in filter(None, (w.strip() for w in visible.split(","))):
        if word.isdigit():
            chosen += found[int(word) : int(word) + 1]
        else:
            chosen += [d for d in found if d.uuid.startswith(word)][:1]
    return chosen


def _nvml() -> list[Device]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [d for i in range(pynvml.nvmlDeviceGetCount()) if (d := _device(pynvml, i)) is not None]
    except pynvml.NVMLError as error:
        log.warning("devices cannot be listed: %s", error)
        return []
    finally:
        pynvml.nvmlShutdown()


def _device(nvml: Any, index: int) -> Device | None:
    """None for one that does not answer (it fell off the bus). Not every kind tells its memory."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        log.warning("device %d is left out: %s", index, error)
        return None
    try:
        return Device(uuid, name, int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20)
    except nvml.NVMLError:
        return Device(uuid, name)


def driver_version() -> str | None:
    """NVIDIA's driver; None if there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        return None
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


class Leases:
    """What one agent holds: all of the devices that it wants, or none: two agents that want several cannot block each other."""

    def __init__(
        self, client: Any, owner: str, lister: Lister, wanted: int | None, ttl_ms: int, share: int = 1, default: int = 1
    ) -> None:
        """`wanted` None: `default` if the host has devices, else none. `share`: agents that may hold the same device."""
        self.client, self.owner, self.lister, self.ttl_ms, self.share = client, owner, lister, ttl_ms, share
        self.scripts = Scripts(client)
        self.wanted = (default if lister() else 0) if wanted is None else wanted
        self.held: dict[str, str] = {}
        """UUID → the key of its lease."""

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(sorted(self.held))

    @property
    def ready(self) -> bool:
        return len(self.held) == self.wanted

    def take(self) -> bool:
        """All that is wanted, if so many are free; otherwise nothing is held. Devices without any holder go first."""
        if self.ready:
            return True
        for slot in range(self.share):
            for device in sorted(self.lister(), key=lambda d: d.uuid):
                key = keys.device(device.uuid, slot)
                if device.uuid not in self.held and self._lease(key):
                    self.held[device.uuid] = key
                if self.ready:
                    return True
        self.release()
        return False

    def renew(self) -> tuple[str, ...]:
        """UUIDs that another agent has taken; the rest is then given back too. A lease that ran out while Redis was away, and
        that nobody took, goes on.
        """
        lost = tuple(uuid for uuid, key in self.held.items() if not self._lease(key))
        if lost:
            self.held = {uuid: key for uuid, key in self.held.items() if uuid not in lost}
            self.release()
        return lost

    def release(self) -> None:
        held, self.held = self.held, {}
        for uuid, key in held.items():
            try:
                self.scripts.release(key, self.owner)
            except redis.RedisError as error:
                log.warning("the lease of device %s runs out by itself: %s", uuid, error)

    def why_not(self) -> str:
        """What the agent waits for, for people."""
        there = len(self.lister())
        word = "device" if self.wanted == 1 else "devices"
        if there < self.wanted:
            return f"waits for {self.wanted} {word}: this host has {there}"
        return f"waits for {self.wanted} free {word} of {there}: others hold them"

    def environment(self) -> dict[str, str]:
        """For the child: it sees what is leased, and nothing else. Hosts without devices are left as they are."""
        return {VISIBLE: ",".join(self.uuids)} if self.held or self.lister() else {}

    def _lease(self, key: str) -> bool:
        return self.scripts.lease(key, self.owner, self.ttl_ms, take=True) == "MINE"
