"""Leases of devices: real Redis, real agents with real children, and a lister written by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.controller.assignment import read_workers
from shared.agent.devices import Device, Leases, list_devices
from shared.config.settings import Settings
from shared.wire import keys
from tests.agent.agents import gone, make, running, seen, soon

GPUS = [Device(f"GPU-{n}", "H200", 141_000) for n in range(4)]


def leases(client: Any, owner: str, wanted: int | None = 1, there: Sequence[Device] = GPUS, share: int = 1) -> Leases:
    return Leases(client, owner, lambda: there, wanted, 60_000, share)


def test_all_that_is_wanted_or_nothing(client: Any) -> None:
    first, second, third = (leases(client, name, 3) for name in ("a", "b", "c"))
    assert first.take() and len(first.uuids) == 3
    assert not second.take() and second.uuids == () and not second.ready
    assert "waits for 3 free devices of 4" in second.why_not()
    one = leases(client, "d", 1)
    assert one.take(), "what the second could not use is free"
    first.release()
    assert third.take() and not set(third.uuids) & set(one.uuids)
    assert "this host has 4" in leases(client, "e", 5).why_not()


@pytest.mark.parametrize("seed", range(5))
def test_nobody_ever_holds_what_another_holds(client: Any, redis_url: str, seed: int) -> None:
    """Agents that want one, two or three of four devices take and give back in a race; whoever holds some holds enough."""
    import random

    from shared.wire.client import connect

    holders: dict[str, str] = {}
    faults: list[str] = []
    lock, took = threading.Lock(), [0] * 6

    def act(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        own = leases(connect(redis_url), f"agent-{number}", 1 + number % 3)
        for _ in range(25):
            if own.take():
                took[number] += 1
                with lock:
                    faults.extend(uuid for uuid in own.uuids if uuid in holders)
                    holders.update(dict.fromkeys(own.uuids, own.owner))
                assert len(own.uuids) == own.wanted and own.renew() == ()
                time.sleep(rng.random() / 500)
                with lock:
                    for uuid in own.uuids:
                        holders.pop(uuid, None)
                own.release()
            else:
                assert own.uuids == ()
                time.sleep(rng.random() / 200)

    threads = [threading.Thread(target=act, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and sum(took) > 25, took
    assert not client.keys("unimesh:device:*")


def test_sharers_take_empty_devices_first(client: Any) -> None:
    found = [leases(client, f"a{n}", 1, GPUS[:2], share=2) for n in range(5)]
    taken = [one.take() for one in found]
    assert taken == [True] * 4 + [False]
    assert {found[0].uuids, found[1].uuids} == {("GPU-0",), ("GPU-1",)} == {found[2].uuids, found[3].uuids}
    two = leases(client, "two", 2, GPUS[:1], share=2)
    assert not two.take(), "two places on one device are not two devices"


def test_hosts_without_devices_need_none(client: Any) -> None:
    assert leases(client, "a", None, []).ready and leases(client, "a", None, []).environment() == {}
    hidden = leases(client, "b", 0)
    assert hidden.ready and hidden.environment() == {"CUDA_VISIBLE_DEVICES": ""}, "a child must not use what it does not hold"


def test_agents_of_one_host_see_different_devices(settings: Settings, folder: Path, client: Any) -> None:
    """Two devices, three agents: the third waits, says so, and takes the device of one that goes."""
    agents = [make(settings, lambda: GPUS[:2]) for _ in range(3)]
    with running(*agents[1:]):
        with running(agents[0]):
            soon(lambda: sum(agent.devices.ready for agent in agents) == 2)
            [waits] = [agent for agent in agents if not agent.devices.ready]
            there = [soon(partial(seen, agent, folder)) for agent in agents if agent is not waits]
            assert sorted(there) == ["GPU-0", "GPU-1"] and waits.child is None
            told = soon(lambda: [w for w in read_workers(client) if w.state == "waiting"])
            assert [w.name for w in told] == [waits.name] and "waits for 1 free device of 2" in told[0].error
            assert waits.health()["problems"] == ["waits for 1 free device of 2: others hold them"]
        if waits is not agents[0]:
            assert soon(lambda: seen(waits, folder)) in ("GPU-0", "GPU-1")
            assert waits.health()["problems"] == [] and waits.health()["error"] == ""
    assert not client.keys("unimesh:device:*"), "agents that leave give their devices back"


def test_a_lost_lease_ends_the_child_at_once(settings: Settings, folder: Path, client: Any) -> None:
    agent = make(settings, lambda: GPUS[:2])
    with running(agent):
        assert soon(lambda: seen(agent, folder)) == "GPU-0"
        first = agent.child
        assert first is not None
        client.set(keys.device("GPU-0", 0), "another", px=60_000)
        soon(lambda: gone(first.pid), 5)
        assert soon(lambda: seen(agent, folder) if agent.child not in (None, first) else None) == "GPU-1"
        assert "lost the lease of GPU-0" in agent.health()["error"]
    assert client.get(keys.device("GPU-0", 0)) == b"another"


def test_who_drains_keeps_its_devices(settings: Settings, folder: Path, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its child may use them for as long as it takes to drain, which is longer than a lease."""
    monkeypatch.setenv("SLEEPER_DRAINS", "1")
    short = replace(settings, lease_s=1)
    agent, other = make(short, lambda: GPUS[:1]), make(short, lambda: GPUS[:1])
    with running(other), running(agent):
        first = soon(lambda: next((one for one in (agent, other) if one.devices.ready and seen(one, folder)), None))
        second, child = other if first is agent else agent, first.child
        assert child is not None and not second.devices.ready
        first.stopping.set()
        ttl = first.devices.ttl_ms / 1000
        until = time.monotonic() + ttl + 1.5
        while time.monotonic() < until:
            assert not gone(child.pid) and not second.devices.ready
            time.sleep(0.1)
        os.kill(child.pid, signal.SIGKILL)
        soon(lambda: second.devices.ready, 10)


def test_a_child_is_not_started_beside_one_that_drains(
    settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLEEPER_DRAINS", "1")
    agent = make(settings, lambda: GPUS[:1])
    with running(agent):
        soon(lambda: seen(agent, folder))
        child = agent.child
        assert child is not None
        agent.drop_child("a test")
        time.sleep(1.5)
        assert agent.child is None and not gone(child.pid), "the device's memory is still taken"
        os.kill(child.pid, signal.SIGKILL)
        soon(lambda: agent.child is not None and agent.child is not child)
        last = agent.child
        assert last is not None
        os.kill(last.pid, signal.SIGKILL)


def test_a_killed_agents_device_goes_to_the_next(settings: Settings, redis_url: str, client: Any, tmp_path: Path) -> None:
    """Real rollout agents as processes. The dead one's child dies with it; its lease runs out."""
    env = os.environ | {
        "UNIMESH_REDIS_URL": redis_url,
        "UNIMESH_STATE": str(tmp_path / "state"),
        "UNIMESH_LEASE_S": "3",
        "UNIMESH_DEVICES": "GPU-left,GPU-right",
        "UNIMESH_DEVICE_COUNT": "2",
    }
    command = [sys.executable, "-m", "services.rollout"]
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        workers = soon(lambda: found if len(found := read_workers(client)) == 2 and any(w.child for w in found) else None, 60)
        [holds] = [w for w in workers if w.devices]
        [waits] = [w for w in workers if not w.devices]
        assert holds.devices == ("GPU-left", "GPU-right") and waits.state == "waiting"
        assert "CUDA_VISIBLE_DEVICES=GPU-left,GPU-right" in Path(f"/proc/{holds.child}/environ").read_text().split("\0")
        maps = Path(f"/proc/{holds.pid}/maps").read_text()
        assert "libtorch" not in maps, "the agent that leases must not have torch"
        os.kill(holds.pid, signal.SIGKILL)
        after = soon(lambda: [w for w in read_workers(client) if w.pid == waits.pid and w.devices and w.child], 30)
        assert after[0].devices == holds.devices
        soon(lambda: gone(holds.child), 5)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def test_devices_are_listed_by_the_drivers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = ["GPU-aaa", "GPU-bbb", "GPU-ccc"]
    fake = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: uuids[handle],
        nvmlDeviceGetName=lambda handle: "H200",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=141 << 30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)

    def listed(env: dict[str, str]) -> list[str]:
        return [d.uuid for d in list_devices("auto", env)]

    assert listed({}) == uuids and list_devices("auto", {})[0] == Device("GPU-aaa", "H200", 141 << 10)
    assert listed({"CUDA_VISIBLE_DEVICES": "2,0"}) == ["GPU-ccc", "GPU-aaa"]
    assert listed({"CUDA_VISIBLE_DEVICES": "GPU-b"}) == ["GPU-bbb"] and listed({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert list_devices("none", {}) == [] and list_devices("MIG-1, MIG-2", {}) == [Device("MIG-1"), Device("MIG-2")]

    def fell_off(handle: int) -> str:
        if handle == 1:
            raise RuntimeError("GPU is lost")
        return "H200"

    monkeypatch.setattr(fake, "nvmlDeviceGetName", fell_off)
    assert listed({}) == ["GPU-aaa", "GPU-ccc"], "one bad device does not take the others along"

    def not_told(handle: int) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(fake, "nvmlDeviceGetMemoryInfo", not_told)
    assert list_devices("auto", {})[0] == Device("GPU-aaa", "H200", 0)

    def no_driver() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(fake, "nvmlInit", no_driver)
    assert listed({}) == []


def test_a_trainer_that_leases_too_few_is_not_taken() -> None:
    from services.controller.assignment import Wanted, assign
    from shared.agent.registry import Assignment, Worker

    def worker(name: str, **more: Any) -> Worker:
        return Worker(name=name, service="trainer", host="h", pid=1, since=0, **more)

    place = Wanted("job", "trainer", "", "", ranks=4)
    few, enough = worker("few", devices=("a", "b")), worker("enough", devices=("a", "b", "c", "d"))
    changes, unfilled = assign([few], {}, [place], lambda: "id")
    assert not changes and "leases 2 of the 4 devices" in unfilled["job"] and "UNIMESH_DEVICE_COUNT" in unfilled["job"]
    assert set(assign([few, enough], {}, [place], lambda: "id").changes) == {"enough"}
    assert set(assign([worker("cpu")], {}, [place], lambda: "id").changes) == {"cpu"}, "ranks without devices use the CPU"
    stuck = worker("few", state="waiting", error="waits for 4 free devices of 4: others hold them")
    had = {"few": Assignment(id="a", job="job", role="trainer", track="")}
    changes, _ = assign([stuck, enough], had, [place], lambda: "id")
    assert changes["few"] is None and changes["enough"] is not None, "who lost its devices loses its place"
    waiting = worker("w", state="waiting", error="waits for 1 free device of 1: others hold them")
    assert "waits for 1 free device" in assign([waiting], {}, [place], lambda: "id").unfilled["job"]
    elsewhere = worker("e", storage="another")
    assert "keeps its files elsewhere" in assign([elsewhere], {}, [place], lambda: "id", "ours").unfilled["job"]
    assert "none is registered" in assign([], {}, [place], lambda: "id").unfilled["job"]
