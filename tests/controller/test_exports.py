"""Which weights an export takes, that they stay until it is written, and what becomes of a request that nobody takes up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from shared.agent.storage import storage_id
from shared.config.settings import Settings
from shared.weights import exports
from shared.weights.checkpoints import Position
from shared.weights.store import WeightStore
from shared.wire.keys import JobKeys
from tests.conftest import recipe, saving
from tests.controller.test_api import api, submit  # noqa: F401  (the fixture)


@pytest.fixture
def job(api: httpx.Client, settings: Settings, client: Any, model_folder: Path) -> str:  # noqa: F811
    """One that went back to a checkpoint of version 5 when it was at version 10, and has made 6 and 7 anew."""
    found = submit(api, recipe(model_folder, name="x"))
    store = WeightStore(settings.weights(found), "policy")
    for incarnation, versions in ((1, (8, 9, 10)), (2, (6, 7))):
        for version in versions:
            store.publish(incarnation, version, [("model.safetensors", [b"x"])])
    with saving(settings.checkpoints(found), Position(1, 5, "entry", {"policy": 5})) as folder:
        (folder / "model.safetensors").write_bytes(b"y")
    with saving(settings.checkpoints(found), Position(1, 11, "left", {"policy": 11})):
        pass  # of the history that was left
    client.hset(JobKeys(found).meta, mapping={"incarnation": 2, "base": "1-5"})
    return found


def ask(api: httpx.Client, job: str, **wanted: Any) -> httpx.Response:  # noqa: F811
    return api.post(f"/v1/jobs/{job}/exports", json=wanted)


def taken(settings: Settings, client: Any) -> exports.Export:
    found = exports.take(client, storage_id(settings))
    assert found is not None
    return found


def test_versions_of_an_abandoned_history_are_not_exported(
    api: httpx.Client,  # noqa: F811
    settings: Settings,
    client: Any,
    job: str,
) -> None:
    assert ask(api, job).json()["version"] == 7
    assert Path(taken(settings, client).weights).parts[-2:] == ("2", "v7")
    for version in (9, 10):
        refused = ask(api, job, version=version)
        assert refused.status_code == 422 and "versions 5, 6, 7" in refused.text
    assert ask(api, job, version=5).json()["state"] == "waiting"
    found = taken(settings, client)
    assert found.incarnation == 0 and Path(found.weights) == settings.checkpoints(job) / "1-5"


def test_what_is_exported_is_not_collected_meanwhile(
    api: httpx.Client,  # noqa: F811
    settings: Settings,
    client: Any,
    job: str,
) -> None:
    ask(api, job, version=6)
    store = WeightStore(settings.weights(job), "policy")
    store.publish(2, 8, [("model.safetensors", [b"x"])])
    assert store.collect(2, 1) == [7] and store.has(2, 6)
    exports.release(settings, taken(settings, client))
    assert store.collect(2, 1) == [6]


def test_agents_with_other_folders_do_not_take_it(
    api: httpx.Client,  # noqa: F811
    settings: Settings,
    client: Any,
    job: str,
) -> None:
    ask(api, job)
    assert exports.take(client, "elsewhere") is None
    assert taken(settings, client).version == 7


def test_a_request_that_nobody_works_on_has_failed(
    api: httpx.Client,  # noqa: F811
    settings: Settings,
    client: Any,
    job: str,
) -> None:
    """A long one is not late while its agent says that it works on it."""
    place = f"/v1/jobs/{job}/exports/{ask(api, job).json()['id']}"
    own, now = taken(settings, client), time.time()
    for state, at, beat, shown in (
        ("waiting", now, 0.0, "waiting"),
        ("waiting", now - exports.QUEUE_S - 1, 0.0, "failed"),
        ("running", now - 5000, now, "running"),
        ("running", now, now - exports.PATIENCE_S - 1, "failed"),
    ):
        exports.save(client, msgspec.structs.replace(own, state=state, at=at, beat=beat))
        assert api.get(place).json()["state"] == shown
    assert api.get(f"{place}/files/model.safetensors").status_code == 409
