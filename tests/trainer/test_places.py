"""The weights store where it may lie: a folder of the host, and an object store that speaks S3 over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from services.trainer.publisher import Publisher
from shared.files import fetched, local, place
from shared.models.ar.bundle import copy_side_files
from shared.weights import store as weight_store
from shared.weights.store import WeightsDamaged, WeightStore
from shared.wire.envelope import Published
from tests.object_store import object_store


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with object_store() as (url, env), pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setitem(os.environ, name, value)
        yield url


@pytest.fixture(params=["folder", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "folder":
        return tmp_path / "weights"
    found = place(f"{request.getfixturevalue('bucket')}/{uuid4().hex}")
    assert not local(found)
    return found


def files(text: bytes) -> list[tuple[str, list[bytes]]]:
    return [("model.safetensors", [text, b"!"])]


def test_a_version_is_there_once_it_is_complete(root: Path) -> None:
    store = WeightStore(root, "policy")
    assert not store.has(1, 0) and store.versions(1) == [] and store.newest(1) is None and store.latest() is None
    assert store.publish(1, 0, files(b"zero")) == 5 and store.publish(1, 2, files(b"two")) == 4
    assert store.versions(1) == [0, 2] and store.has(1, 2) and store.latest() == store.path(1, 2)
    assert [(name, bytes(data)) for name, data in store.read(1, 0)] == [("model.safetensors", b"zero!")]
    assert store.publish(1, 2, files(b"other")) == 0 and bytes(store.read(1, 2)[0][1]) == b"two!", "it is never written again"
    assert store.digest(1, 0) != store.digest(1, 2)
    with pytest.raises(FileNotFoundError):
        store.read(1, 1)


def test_an_attempt_that_died_is_no_version_and_is_written_anew(root: Path) -> None:
    store = WeightStore(root, "policy")
    left = store.path(1, 3)
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    (left / "more.safetensors").write_bytes(b"half")
    assert not store.has(1, 3)
    store.publish(1, 3, files(b"whole"))
    assert [(name, bytes(data)) for name, data in store.read(1, 3)] == [("model.safetensors", b"whole!")]


def test_another_attempt_changes_nothing_that_is_complete(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that was replaced still writes while its successor completes the version; both have begun without a marker."""
    store, other = WeightStore(root, "policy"), WeightStore(root, "policy")

    def late() -> Iterator[tuple[str, list[bytes]]]:
        yield from files(b"old")
        other.publish(1, 7, files(b"new"))

    assert store.publish(1, 7, late()) == 0
    assert bytes(store.read(1, 7)[0][1]) == b"new!"
    assert len([*store.path(1, 7).glob("*.safetensors"), *store.path(1, 7).glob("*/*.safetensors")]) == 1


def test_a_copy_is_a_version_too(root: Path, tmp_path: Path) -> None:
    store = WeightStore(root, "policy")
    store.publish(1, 7, [("adapter_config.json", [b"{}"]), *files(b"seven")])
    copy = weight_store.here(store.path(1, 7), tmp_path / "fetched", 3600)
    assert local(copy) and {path.name for path in weight_store.open_version(copy)} == {
        "adapter_config.json",
        "model.safetensors",
    }
    assert (copy / "model.safetensors").read_bytes() == b"seven!"


def test_damage_is_seen_and_dropped(root: Path) -> None:
    store = WeightStore(root, "policy")
    store.publish(1, 0, files(b"zero"))
    store.publish(1, 1, files(b"one"))
    [shard] = store.open(1, 0)
    shard.write_bytes(b"ZERO!")
    with pytest.raises(WeightsDamaged):
        store.read(1, 0)
    assert store.drop_damaged(1) == [0] and store.versions(1) == [1]
    store.publish(1, 0, files(b"zero"))
    assert bytes(store.read(1, 0)[0][1]) == b"zero!"


def test_what_is_leased_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(root, "policy")
    for version in range(4):
        store.publish(1, version, files(b"x"))
    with store.leased(1, 0, "reader"):
        assert store.collect(1, keep=1) == [1, 2]
        monkeypatch.setattr(weight_store, "LEASE_S", -1.0)
        assert store.collect(1, keep=1) == [0], "a lease that nobody renews runs out"
    assert store.versions(1) == [3] and not store.path(1, 1).exists()


def test_ranks_write_their_shares(root: Path) -> None:
    import torch

    store, said = WeightStore(root, "policy"), list[Published]()
    publishers = [Publisher(store, 1, 2, False, said.append, rank=rank, ranks=2) for rank in (1, 0)]
    for publisher, name in zip(publishers, "ab", strict=True):
        publisher.publish(5, {name: torch.ones(3)})
    for publisher in publishers:
        publisher.flush(5)
    assert [event.version for event in said] == [5]
    assert len(store.read(1, 5)) == 2 and not (root / "policy" / "1" / "parts-5").exists()


def test_files_of_the_model_go_there_and_back(root: Path, model_folder: Path, tmp_path: Path) -> None:
    store = WeightStore(root, "policy")
    copy_side_files(model_folder, store.files)
    copy_side_files(model_folder, store.files)
    here = fetched(store.files, tmp_path / "fetched")
    assert {"config.json", "tokenizer.json"} <= {path.name for path in here.iterdir()}
    assert (here / "config.json").read_bytes() == (model_folder / "config.json").read_bytes()
    assert fetched(store.files, tmp_path / "fetched") == here
