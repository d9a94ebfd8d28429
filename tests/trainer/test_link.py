"""What the trainer makes of a log in which nothing new stands: trimmed, quiet, or gone."""

from __future__ import annotations

from typing import Any

import pytest

from services.trainer import link as links
from services.trainer.link import Link
from shared.config.settings import Settings
from shared.weights.checkpoints import Position
from shared.wire.bodies import BodyStore, open_bodies
from shared.wire.codec import pack
from shared.wire.envelope import LogEntry, RolledBack
from shared.wire.keys import JobKeys, assignment

KEYS = JobKeys("j")


@pytest.fixture
def link(settings: Settings, client: Any, monkeypatch: pytest.MonkeyPatch) -> Link:
    monkeypatch.setattr(links, "POLL_MS", 20)
    client.set(assignment("t"), b"mine")
    client.hset(KEYS.meta, "incarnation", 2)
    return Link(client, KEYS, BodyStore(client, KEYS, open_bodies(settings.bodies, "j")), "t", b"mine")


def write(client: Any, seq: int, previous: str = "") -> None:
    entry = LogEntry(seq=seq, id=f"r{seq}", previous=previous, incarnation=2, kind="evaluate")
    client.xadd(KEYS.log, {"e": pack(entry)}, id=f"{seq}-0")


def apply(link: Link) -> None:
    entry = link.next()
    assert isinstance(entry, LogEntry)
    link.applied(entry)


def test_a_new_history_may_begin_late(link: Link, client: Any) -> None:
    """After going back to a checkpoint its rollouts take longer than one poll: nothing of this log can be missing yet."""
    link.resume(Position(1, 7, "r7", {"policy": 3}), incarnation=2)
    assert [link.next(), link.next()] == [None, None]
    write(client, 8)
    apply(link)
    assert link.next() is None


@pytest.mark.parametrize("known", [True, False])
def test_a_record_that_was_applied_and_is_gone(link: Link, client: Any, known: bool) -> None:
    write(client, 1)
    if known:
        apply(link)
    else:
        link.resume(Position(2, 1, "r1", {"policy": 0}), incarnation=2)
    assert link.next() is None
    client.delete(KEYS.log)
    lost = link.next()
    assert isinstance(lost, RolledBack) and lost.seq == 1


def test_another_record_in_the_place_of_the_one_applied(link: Link, client: Any) -> None:
    write(client, 1)
    apply(link)
    client.delete(KEYS.log)
    client.xadd(KEYS.log, {"e": pack(LogEntry(seq=1, id="other", previous="", incarnation=2, kind="evaluate"))}, id="1-0")
    assert isinstance(link.next(), RolledBack)


def test_a_record_that_a_checkpoint_covers_may_be_trimmed(link: Link, client: Any) -> None:
    write(client, 1)
    apply(link)
    client.xdel(KEYS.log, "1-0")
    assert link.next() is None
