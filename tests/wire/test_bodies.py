"""The three homes of a body behave alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.wire.bodies import Bodies, BodyStore, DirectoryBodies, open_bodies
from shared.wire.envelope import BodyRef
from shared.wire.errors import BodyLost, WireError
from shared.wire.keys import JobKeys

KEYS = JobKeys("j")


@pytest.fixture(params=["dir", "shm", "fsspec"])
def backend(request: Any, tmp_path: Path) -> Bodies:
    url = {"dir": f"dir:{tmp_path}", "shm": f"shm:{tmp_path}", "fsspec": f"file://{tmp_path}"}[request.param]
    return open_bodies(url, "j")


def test_put_get_sweep(backend: Bodies) -> None:
    refs = [backend.put(shelf, f"a/b:{shelf}", [b"abc", memoryview(b"def")]) for shelf in (1, 2, 3)]
    assert all(bytes(backend.get(ref)) == b"abcdef" for ref in refs)
    assert backend.sweep(3) == 2
    with pytest.raises(BodyLost):
        backend.get(refs[0])
    assert bytes(backend.get(refs[2])) == b"abcdef"
    backend.remove()
    with pytest.raises(BodyLost):
        backend.get(refs[2])


def test_damage_is_noticed(tmp_path: Path) -> None:
    bodies = DirectoryBodies(tmp_path)
    ref = bodies.put(0, "x", [b"0123456789"])
    next((tmp_path / "0").iterdir()).write_bytes(b"012345678X")
    with pytest.raises(BodyLost, match="damaged"):
        bodies.get(ref)


@pytest.mark.parametrize("uri", ["dir:0/../../x", "dir:../x/y", "dir:0/.x", "dir:0/", "fs:0/x", "/etc/passwd", "dir:0/a/b"])
def test_a_reference_names_nothing_outside_the_store(tmp_path: Path, uri: str) -> None:
    with pytest.raises(WireError):
        DirectoryBodies(tmp_path).get(BodyRef(uri=uri, nbytes=1))


def test_small_bodies_ride_in_the_commit_and_large_ones_do_not(client: Any, tmp_path: Path) -> None:
    store = BodyStore(client, KEYS, DirectoryBodies(tmp_path), redis_limit=10)
    ref, small = store.place(4, "g#0.0", [b"12345", b"67890"])
    assert ref.uri == "redis:4/g#0.0" and small == b"1234567890"
    client.hset(KEYS.shelf(4), "g#0.0", small)
    large, none = store.place(4, "h#0.0", [b"12345678901"])
    assert none is None
    assert [bytes(b) for b in store.load_many([large, ref])] == [b"12345678901", b"1234567890"]
    client.unlink(KEYS.shelf(4))
    with pytest.raises(BodyLost, match="redis:4"):
        store.load(ref)
