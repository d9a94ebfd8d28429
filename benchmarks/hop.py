"""The commit of a hop with one output against the bare pipeline XADD + XACK + XDEL, on one client, alternating."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.codec import timed
from benchmarks.report import Row, publish
from shared.wire.client import connect
from shared.wire.hops import Commit, meta_fields, phase, send_all
from shared.wire.keys import GROUP, JobKeys
from shared.wire.scripts import Entry, Scripts, ensure_group, send
from shared.wire.server import RedisServer

ROUNDS = 600
HEAD = b"x" * 600
PHASE = phase("train", 0, "rollout.policy")


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="hop-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            return measure(connect(server.url))
        finally:
            server.kill()


def measure(client: Any) -> list[Row]:
    keys, scripts = JobKeys("bench"), Scripts(client)
    source, stage = keys.stage("rollout.policy"), "reward.exact"
    client.hset(keys.meta, mapping=meta_fields(1, ("rollout.policy", "reward"), ("exact",)))
    client.zadd(keys.open, {"g#0": 0})
    for stream in (source, keys.stage(stage)):
        ensure_group(client, stream)

    def entry() -> bytes:
        with client.pipeline(transaction=False) as pipe:
            pipe.xadd(source, {"h": HEAD})
            pipe.xreadgroup(GROUP, "me", {source: ">"}, count=1)
            found: bytes = pipe.execute()[1][0][1][0][0]
        return found

    def bare(entry_id: bytes) -> None:
        with client.pipeline(transaction=False) as pipe:
            pipe.xadd(keys.stage(stage), {"g": "g#0", "s": "0", "h": HEAD})
            pipe.xack(source, GROUP, entry_id)
            pipe.xdel(source, entry_id)
            pipe.execute()

    def hop(entry_id: bytes) -> None:
        writes = [send(keys, stage, "g#0", 0, {"g": "g#0", "s": "0", "h": HEAD})]
        send_all(scripts, keys, "me", [Commit(Entry(source, entry_id.decode(), {}), (PHASE, 1, "g#0"), writes)])

    times: dict[str, list[float]] = {"bare": [], "hop": []}
    for _ in range(ROUNDS):
        for name, call in (("bare", bare), ("hop", hop)):
            entry_id = entry()
            times[name].append(timed(lambda: call(entry_id)))  # noqa: B023
    medians = {name: statistics.median(values[50:]) * 1e6 for name, values in times.items()}
    note = f"{medians['hop']:.0f} us against {medians['bare']:.0f} us"
    return [Row("commit hop with one output, p50 / bare XADD+XACK+XDEL", medians["hop"] / medians["bare"], 1.3, note=note)]


if __name__ == "__main__":
    raise SystemExit(publish("hop", rows()) > 0)
