"""The HTTP API against a real server on loopback, with the controller's own threads and simulated workers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from services.controller.api.app import make_app
from services.controller.mesh import Mesh
from shared.config.settings import Settings
from shared.wire.client import connect
from shared.wire.keys import GROUP, JobKeys
from shared.wire.scripts import ensure_group
from tests.conftest import recipe
from tests.simulated import Simulated


@pytest.fixture
def api(settings: Settings) -> Iterator[httpx.Client]:
    with serving(settings) as client:
        yield client


@contextmanager
def serving(settings: Settings) -> Iterator[httpx.Client]:
    app = make_app(settings, lambda: Mesh(lambda: connect(settings.redis_url), settings))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        yield client
    server.should_exit = True
    thread.join(30)


def submit(api: httpx.Client, document: dict[str, Any], **more: Any) -> str:
    answer = api.post("/v1/jobs", json={"document": document, **more})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def until(api: httpx.Client, job: str, state: str, patience: float = 20) -> dict[str, Any]:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        view: dict[str, Any] = api.get(f"/v1/jobs/{job}").json()
        if view["state"] == state:
            return view
        time.sleep(0.05)
    raise AssertionError(view)


def test_a_job_runs_to_its_end_and_shows_everything(api: httpx.Client, settings: Settings, model_folder: Path) -> None:
    document = recipe(model_folder, eval={"easy": {"source": {"name": "sorting"}, "size": 3}}, train__checkpoint_every=1)
    job = submit(api, document)
    view = until(api, job, "starting")
    assert view["waits_for"] == "a trainer to load the model"
    with Simulated(settings, job):
        view = until(api, job, "done")
    assert view["step"] == 3 and view["waits_for"] == "" and view["versions"]["published"] == {"policy": 3}
    assert view["ledger"] == {"issued": 6, "trained": 6, "dropped": {}, "dead": 0, "in_flight": 0}
    assert {e["tag"]: e["prompts"] for e in view["evals"]} == {"start": 3, "end": 3}
    assert all(e["reward"] == e["pass@1"] == 0.0 and e["samples"] == 3 for e in view["evals"])
    assert all(len(e["previews"]) == 3 and e["previews"][0]["prompt"].endswith(">") for e in view["evals"])
    steps = api.get(f"/v1/jobs/{job}/steps").json()
    assert [s["step"] for s in steps] == [1, 2, 3] and {"reward", "seconds/train", "groups_equal"} <= set(steps[0])
    assert api.get(f"/v1/jobs/{job}/steps", params={"since": 2}).json() == steps[2:]
    [row] = api.get("/v1/jobs").json()["jobs"]
    assert row["id"] == job and row["state"] == "done"
    assert api.get("/v1/jobs", params={"state": "failed"}).json() == {"jobs": [], "next": None}
    kinds = [e["event"] for e in events(api, job)]
    assert kinds.count("step") == 3 and "note" in kinds


def events(api: httpx.Client, job: str, last: str | None = None) -> list[dict[str, Any]]:
    headers = {"Last-Event-ID": last} if last else {}
    answer = api.get(f"/v1/jobs/{job}/events", params={"follow": False}, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in lines:
            found.append(lines | {"data": json.loads(lines["data"])})
    return found


def test_events_resume_after_the_last_one_seen(api: httpx.Client, settings: Settings, model_folder: Path) -> None:
    job = submit(api, recipe(model_folder))
    with Simulated(settings, job):
        until(api, job, "done")
    whole = events(api, job)
    assert events(api, job, whole[-1]["id"]) == []
    again = events(api, job, whole[2]["id"])
    assert [e["data"] for e in again] == [e["data"] for e in whole[3:]]


def test_a_job_cancelled_while_it_is_launched(api: httpx.Client, settings: Settings, model_folder: Path) -> None:
    """Before any worker has come: it ends, its name is free, and workers that come later find nothing to do."""
    job = submit(api, recipe(model_folder, name="short"))
    assert api.post(f"/v1/jobs/{job}/cancel").status_code == 202
    view = until(api, job, "cancelled")
    assert view["ledger"]["issued"] == 0 and view["step"] == 0
    again = submit(api, recipe(model_folder, name="short"))
    with Simulated(settings, again):
        until(api, again, "done")
    assert api.get(f"/v1/jobs/{job}").json()["state"] == "cancelled"


def test_cancel_ends_a_running_job(api: httpx.Client, settings: Settings, model_folder: Path) -> None:
    job = submit(api, recipe(model_folder, steps=100_000))
    with Simulated(settings, job):
        deadline = time.monotonic() + 20
        while api.get(f"/v1/jobs/{job}").json()["step"] < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert api.post(f"/v1/jobs/{job}/cancel").status_code == 202
        view = until(api, job, "cancelled")
    assert view["ledger"]["in_flight"] == 0 and view["reason"]


def test_pause_and_resume(api: httpx.Client, settings: Settings, model_folder: Path) -> None:
    job = submit(api, recipe(model_folder, steps=30))
    with Simulated(settings, job, delay=0.02):
        api.post(f"/v1/jobs/{job}/pause")
        step = until(api, job, "paused")["step"]
        time.sleep(0.5)
        assert api.get(f"/v1/jobs/{job}").json()["step"] <= step + 1
        api.post(f"/v1/jobs/{job}/resume")
        until(api, job, "done")


def test_a_bad_submission_is_a_problem_document_and_makes_nothing(api: httpx.Client, model_folder: Path) -> None:
    answer = api.post("/v1/jobs", json={"document": recipe(model_folder, rollout__groupsize=2)})
    assert answer.status_code == 422 and answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["problems"][0]["field"] == "rollout.groupsize" and body["problems"][0]["nearest"] == "group_size"
    assert api.get("/v1/jobs").json()["jobs"] == []


@pytest.mark.parametrize("body", [{}, {"recipe": "ar/sort", "document": {}}, {"recip": "x"}, {"document": 3}])
def test_a_malformed_submission_is_422(api: httpx.Client, body: dict[str, Any]) -> None:
    answer = api.post("/v1/jobs", json=body)
    assert answer.status_code == 422 and answer.json()["status"] == 422


@pytest.mark.parametrize("path", ["/v1/jobs/none", "/v1/jobs/none/steps", "/v1/jobs/none/events", "/v1/nowhere"])
def test_what_does_not_exist_is_404(api: httpx.Client, path: str) -> None:
    answer = api.get(path)
    assert answer.status_code == 404 and answer.headers["content-type"] == "application/problem+json"


def test_dry_run_returns_the_plan_and_makes_nothing(api: httpx.Client, model_folder: Path) -> None:
    overrides = [f"model.path={model_folder}"]
    answer = api.post("/v1/jobs", json={"recipe": "ar/sort", "overrides": overrides, "dry_run": True})
    assert answer.status_code == 200 and answer.json()["plan"]["batch_size"] == 32
    assert api.get("/v1/jobs").json()["jobs"] == []


def test_an_idempotency_key_makes_one_job(api: httpx.Client, model_folder: Path) -> None:
    headers, body = {"Idempotency-Key": "k"}, {"document": recipe(model_folder)}
    first, second = (api.post("/v1/jobs", json=body, headers=headers).json()["id"] for _ in range(2))
    assert first == second and len(api.get("/v1/jobs").json()["jobs"]) == 1


def test_health(api: httpx.Client) -> None:
    assert api.get("/healthz").status_code == api.get("/readyz").status_code == 200
    assert api.get("/v1/workers").json() == [] and "ar/sort" in {r["name"] for r in api.get("/v1/recipes").json()}


def test_a_failed_scorer_and_poison_show_in_counts_and_dead_letters(
    api: httpx.Client, settings: Settings, model_folder: Path
) -> None:
    job = submit(api, recipe(model_folder, steps=4))
    with Simulated(settings, job, poison=lambda row: row == 1):
        view = until(api, job, "done")
    assert view["ledger"]["dead"] == 1 and view["dead_letters"] == 1
    [letter] = api.get(f"/v1/jobs/{job}/dead-letters").json()
    assert letter["gid"] == "sorting:0:1#0" and "poison" in letter["error"] and letter["stage"] == "rollout.policy:0"


def test_jobs_come_in_pages(api: httpx.Client, model_folder: Path) -> None:
    names = [f"job-{i}" for i in range(5)]
    for name in names:
        submit(api, recipe(model_folder, name=name))
    found: list[str] = []
    after: str | None = None
    while True:
        page = api.get("/v1/jobs", params={"limit": 2, **({"after": after} if after else {})}).json()
        found += [row["name"] for row in page["jobs"]]
        after = page["next"]
        if after is None:
            break
    assert found == names[::-1]
    assert [row["name"] for row in api.get("/v1/jobs", params={"name": "job-3"}).json()["jobs"]] == ["job-3"]
    assert api.get("/v1/jobs", params={"after": "nobody"}).status_code == 422
    assert api.get("/v1/jobs", params={"state": "nonsense"}).status_code == 422


def test_what_may_be_named_is_listed_with_its_schema(api: httpx.Client) -> None:
    recipes = {row["name"]: row for row in api.get("/v1/recipes").json()}
    assert recipes["ar/sort"]["domain"] == "ar" and "GRPO" in recipes["ar/sort"]["about"]
    one = api.get("/v1/recipes/ar/sort").json()
    assert "batch_size: 32" in one["text"] and "rollout" in one["schema"]["properties"]
    assert api.get("/v1/recipes/ar/nothing").status_code == 404
    scorers = {c["name"]: c for c in api.get("/v1/components", params={"kind": "scorer"}).json()}
    assert "pattern" in scorers["regex"]["parameters"]["properties"] and "grpo" not in scorers


def test_what_adapters_and_budgets_mean_is_said_first(api: httpx.Client, model_folder: Path) -> None:
    """The modules that get adapters are listed; a budget that one sequence exceeds is refused with the least that does."""
    document = recipe(
        model_folder, model__lora={"rank": 2, "alpha": 4, "targets": ["q_proj", "down_proj"]}, train__micro_batch_tokens=4096
    )
    answer = api.post("/v1/jobs", json={"document": document, "dry_run": True}).json()
    named = answer["estimate"]["adapted_modules"]
    assert len(named) >= 4 and {name.rpartition(".")[2] for name in named} == {"q_proj", "down_proj"}
    longest = answer["estimate"]["prompt_tokens"]["max"] + 4
    document["train"]["micro_batch_tokens"] = longest - 1
    answer = api.post("/v1/jobs", json={"document": document, "dry_run": True}).json()
    assert answer["status"] == 422 and "train.micro_batch_tokens" in str(answer) and f"at least {longest}" in str(answer)
    document["train"]["micro_batch_tokens"] = longest
    assert api.post("/v1/jobs", json={"document": document, "dry_run": True}).status_code < 300


def test_lag_and_age_of_a_scorers_stream(api: httpx.Client, client: Any, model_folder: Path) -> None:
    """Two messages that nobody has read, the older of 40 seconds; then one of them in somebody's hand."""
    keys = JobKeys(submit(api, recipe(model_folder)))
    stream = keys.stage("reward.exact")
    ensure_group(client, stream)
    now = time.time()
    for age in (40, 10):
        client.xadd(stream, {"x": "y"}, id=f"{int((now - age) * 1000)}-0")
    [row] = [row for row in api.get("/v1/streams").json() if row["stage"] == "reward.exact"]
    assert (row["waiting"], row["in_hand"], row["workers"]) == (2, 0, 0) and 40 <= row["oldest_seconds"] < 50
    client.xreadgroup(GROUP, "somebody", {stream: ">"}, count=1)
    [row] = [row for row in api.get("/v1/streams").json() if row["stage"] == "reward.exact"]
    assert (row["waiting"], row["in_hand"], row["workers"]) == (1, 1, 1) and 40 <= row["oldest_seconds"] < 50


def test_a_controller_that_hangs_is_not_well(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process lives and answers, but a thread of it has stood still for too long."""
    held = threading.Event()
    with serving(replace(settings, hang_s=1)) as api:
        assert api.get("/healthz").status_code == 200
        monkeypatch.setattr(Mesh, "look", lambda mesh: held.wait(20))
        deadline = time.monotonic() + 10
        while (answer := api.get("/healthz")).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert answer.status_code == 503 and "jobs has made no progress for 1 s" in answer.json()["detail"]
        held.set()
        monkeypatch.undo()
        while api.get("/healthz").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_streams_and_metrics_of_a_running_job(api: httpx.Client, settings: Settings, model_folder: Path) -> None:
    job = submit(api, recipe(model_folder, steps=400, name="seen"))
    with Simulated(settings, job, delay=0.02):
        deadline = time.monotonic() + 20
        while api.get(f"/v1/jobs/{job}").json()["step"] < 3:
            assert time.monotonic() < deadline
        streams = api.get("/v1/streams").json()
        assert {s["stage"] for s in streams} == {"rollout.policy", "reward.exact", "inbox"} and streams[0]["workers"] == 1
        text = api.get("/metrics").text
        api.post(f"/v1/jobs/{job}/cancel")
        until(api, job, "cancelled")
    assert f'unimesh_job_step{{job="{job}",name="seen"}}' in text and 'unimesh_jobs{state="running"} 1.0' in text
    assert 'figure="reward"' in text and 'fate="trained"' in text and 'stage="reward.exact"' in text
    assert api.get("/v1/streams").json() == []
