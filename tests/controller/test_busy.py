"""How busy services were: what overlaps counts once, within a batch and across batches."""

from __future__ import annotations

import msgspec
import pytest

from services.controller.busy import KEPT_S, Meter, bottleneck, services
from services.controller.lifecycles.state import Group
from shared.wire.envelope import SliceHead, Span


def group(*spans: Span) -> Group:
    return Group(gid="g", draw=0, issue=0, shelf=0, needs={}, issued_at=0.0, slices=(SliceHead(parts=(), spans=spans),))


def test_time_counts_once() -> None:
    meter = Meter()
    rollout = "rollout.policy"
    first = meter.add([group(Span(rollout, "a", 0, 4), Span(rollout, "a", 2, 4)), group(Span(rollout, "b", 1, 1))])
    assert first == {f"busy/{rollout}": 7.0, f"workers/{rollout}": 2.0}
    adopts = Span(f"{rollout} adopt", "a", 50, 9)
    second = meter.add([group(Span(rollout, "a", 4, 4), Span("reward.x", "c", 5, 1), adopts)])
    assert second == {f"busy/{rollout}": 2.0, f"workers/{rollout}": 2.0, "busy/reward.x": 1.0, "workers/reward.x": 1.0}
    assert meter.add([group(Span(rollout, "a", 0, 8))])[f"busy/{rollout}"] == 0.0
    later = meter.add([group(Span(rollout, "b", KEPT_S + 9, 1))])
    assert later == {f"busy/{rollout}": 1.0, f"workers/{rollout}": 1.0}, "who has left is no longer counted"


def test_the_bottleneck_in_words() -> None:
    steps = [
        {"at": 10.0 * k, "busy/rollout.policy": 18.0, "workers/rollout.policy": 2.0, "seconds/train": 4.0} for k in range(4)
    ]
    found = services(steps)
    assert found["rollout.policy"] == {"busy": pytest.approx(0.9), "workers": 2.0}
    assert bottleneck(found) == "rollout.policy is the bottleneck: busy 90% of the time; idle: trainer 60%"
    assert services(steps[:1]) == {} and bottleneck({}) == ""
    assert msgspec.to_builtins(found)
