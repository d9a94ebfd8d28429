"""The examples of the OpenAPI document look like what the API answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from services.controller.api.app import make_app
from services.controller.api.examples import examples
from shared.agent.registry import Worker
from shared.config.settings import Settings
from shared.wire import keys
from shared.wire.client import connect
from shared.wire.codec import pack
from tests.conftest import recipe
from tests.controller.test_api import api, submit, until  # noqa: F401  (the fixture)
from tests.simulated import Simulated

OPEN = {
    "last",
    "rates",
    "publishes",
    "ledger",
    "dropped",
    "counts",
    "seconds",
    "components",
    "versions",
    "recipe",
    "overrides",
    "args",
}
"""Mappings whose keys are figures or names: which there are depends on the job."""


def shape(value: Any, at: str = "") -> Any:
    if isinstance(value, dict):
        return "mapping" if at in OPEN else {name: shape(inner, name) for name, inner in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value and isinstance(value[0], dict) else "list"
    return "value"


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, Any]]:
    return examples()


def test_every_example_is_in_the_document(settings: Settings, known: dict[str, dict[str, Any]]) -> None:
    document = make_app(settings).openapi()
    for key, found in known.items():
        method, _, path = key.partition(" ")
        operation = document["paths"][path][method.lower()]
        answers = [a["content"]["application/json"].get("example") for c, a in operation["responses"].items() if c[0] == "2"]
        assert answers == [found["answer"]], key
    sent = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    assert sent["example"] == known["POST /v1/jobs"]["request"]


def test_answers_have_the_shape_of_their_examples(
    api: httpx.Client,  # noqa: F811
    settings: Settings,
    model_folder: Path,
    known: dict[str, dict[str, Any]],
) -> None:
    suite = {"held_out": {"source": {"name": "sorting"}, "size": 2}}
    job = submit(api, recipe(model_folder, name="x", eval=suite))
    with Simulated(settings, job):
        until(api, job, "done")
    worker = Worker(name="w", service="rollout", host="h", pid=1, since=0.0, state="idle", beat=0.0)
    client = connect(settings.redis_url)
    client.set(keys.worker("w"), pack(worker))
    client.sadd(keys.WORKERS, "w")
    gid = api.get(f"/v1/jobs/{job}/samples").json()["samples"][0]["gid"]
    query = {"lineage": {"id": gid}, "trace": {"step": 2}, "components": {"kind": "tracker"}}
    for key, found in known.items():
        method, _, path = key.partition(" ")
        if method != "GET" or path.endswith("/steps"):
            continue
        answer = api.get(path.replace("{job}", job), params=query.get(path.rpartition("/")[2], {})).json()
        said, wanted = shape(answer), shape(found["answer"])
        assert said == wanted, f"{key}: run `make record`"
    step = api.get(f"/v1/jobs/{job}/steps").json()[0]
    assert {"step", "seq", "at", "versions", "reward"} <= step.keys() & known["GET /v1/jobs/{job}/steps"]["answer"][0].keys()
