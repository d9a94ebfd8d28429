"""What people see of what was trained: samples, lineage, dead letters; nothing is missing after a trim or a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest

from services.controller.jobs import create, prepare
from services.controller.lifecycles.state import Root
from services.controller.mesh import Mesh
from services.controller.records import Records
from shared.config.settings import Settings
from shared.wire.client import connect
from shared.wire.codec import pack
from shared.wire.keys import JobKeys
from tests.conftest import recipe
from tests.controller.test_api import api, submit, until  # noqa: F401  (the fixture)
from tests.simulated import Simulated


def pages(api: httpx.Client, job: str, **query: Any) -> list[dict[str, Any]]:  # noqa: F811
    found: list[dict[str, Any]] = []
    after: str | None = None
    while True:
        answer = api.get(f"/v1/jobs/{job}/samples", params={**query, **({"after": after} if after else {})}).json()
        found += answer["samples"]
        after = answer["next"]
        if after is None:
            return found


def test_pages_of_large_groups_lack_nothing(api: httpx.Client, settings: Settings, model_folder: Path) -> None:  # noqa: F811
    """Siblings are in the order of their numbers: 10 comes after 9, wherever a page ends."""
    job = submit(api, recipe(model_folder, steps=2, rollout__group_size=12, rollout__slice=5))
    with Simulated(settings, job):
        until(api, job, "done")
    whole = [(s["step"], s["id"]) for s in pages(api, job, limit=1000)]
    assert len(set(whole)) == 2 * 2 * 12
    for limit in (1, 5, 7):
        assert [(s["step"], s["id"]) for s in pages(api, job, limit=limit)] == whole


def test_every_trained_sample_is_there(api: httpx.Client, settings: Settings, model_folder: Path) -> None:  # noqa: F811
    """Also those of steps whose log was trimmed at once: every step has a checkpoint."""
    job = submit(api, recipe(model_folder, steps=12, train__checkpoint_every=1, logging={"texts": 1}))
    with Simulated(settings, job):
        until(api, job, "done")
    found = pages(api, job, limit=7)
    assert [(s["step"], s["id"]) for s in found] == sorted(((s["step"], s["id"]) for s in found), key=lambda k: (-k[0], k[1]))
    assert len(found) == 12 * 2 * 2 and {s["step"] for s in found} == set(range(1, 13))
    for sample in found:
        assert sample["reward"] == sample["components"]["exact"] and sample["advantage"] is not None
        assert sample["version"] == sample["step"] - 1 and sample["worker"] == "simulated" and sample["status"] == "ok"
    texts = [s for s in found if s["completion"] is not None]
    assert len(texts) == 12 * 2 and all(s["completion"] == "abc" and s["prompt"].endswith(">") for s in texts)
    assert {s["reward"] for s in pages(api, job, reward_min=0.5)} == {1.0}
    assert {s["step"] for s in pages(api, job, step=3)} == {3} and pages(api, job, status="truncated") == []
    place = {"group": found[0]["gid"], "id": found[0]["id"]}
    assert api.get(f"/v1/jobs/{job}/body", params=place).status_code == 410, "its step has a checkpoint"
    assert api.get(f"/v1/jobs/{job}/body", params=place | {"id": "x"}).status_code == 404
    [group] = api.get(f"/v1/jobs/{job}/lineage", params={"id": found[0]["gid"]}).json()
    assert group["step"] == 12 and len(group["samples"]) == 2 and set(group["scored_by"]) == {"exact"}
    [one] = api.get(f"/v1/jobs/{job}/lineage", params={"id": found[0]["id"]}).json()
    assert [s["id"] for s in one["samples"]] == [found[0]["id"]]
    for query in ({"id": "nobody"}, {"id": "nobody#0"}):
        assert api.get(f"/v1/jobs/{job}/lineage", params=query).status_code == 404
    for wide in ({"step": str(10**30)}, {"after": f"{10**30}:x"}):
        assert api.get(f"/v1/jobs/{job}/samples", params=wide).status_code == 422
    wrong = api.get(f"/v1/jobs/{job}/samples", params={"after": "nonsense"})
    assert wrong.status_code == 422 and wrong.json()["problems"][0]["field"] == "after"


def test_only_so_many_steps_are_kept(api: httpx.Client, settings: Settings, model_folder: Path) -> None:  # noqa: F811
    job = submit(api, recipe(model_folder, steps=9, logging={"keep_steps": 4}))
    with Simulated(settings, job):
        until(api, job, "done")
    assert {s["step"] for s in Records(settings.records(job)).samples(limit=1000)} == {6, 7, 8, 9}


def test_a_message_is_shown_on_demand(api: httpx.Client, settings: Settings, model_folder: Path) -> None:  # noqa: F811
    job = submit(api, recipe(model_folder, steps=400))
    with Simulated(settings, job, delay=0.02):
        deadline = time.monotonic() + 20
        while not (found := api.get(f"/v1/jobs/{job}/samples").json()["samples"]):
            assert time.monotonic() < deadline
        answer = api.get(f"/v1/jobs/{job}/body", params={"group": found[0]["gid"], "id": found[0]["id"]})
        api.post(f"/v1/jobs/{job}/cancel")
    assert answer.headers["content-type"] == "application/msgpack"
    assert found[0]["id"] in repr(msgpack.unpackb(answer.content, strict_map_key=False)), "any reader opens it"


def test_a_dead_letter_is_issued_again_or_thrown_away(
    api: httpx.Client,  # noqa: F811
    settings: Settings,
    model_folder: Path,
) -> None:
    """Poison at first, then not: the prompt comes back under its next issue and is trained."""
    sick = {2, 5}
    job = submit(api, recipe(model_folder, steps=400, name="letters"))
    with Simulated(settings, job, delay=0.01, poison=lambda row: row in sick):
        deadline = time.monotonic() + 20
        while len(letters := api.get(f"/v1/jobs/{job}/dead-letters").json()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert [x["gid"] for x in letters] == ["sorting:0:2#0", "sorting:0:5#0"] and "poison" in letters[0]["error"]
        sick.clear()
        assert api.post(f"/v1/jobs/{job}/dead-letters/{letters[0]['id']}/reissue").status_code == 202
        assert api.post(f"/v1/jobs/{job}/dead-letters/{letters[1]['id']}/discard").status_code == 202
        assert api.post(f"/v1/jobs/{job}/dead-letters/{letters[0]['id']}/reissue").status_code == 404
        assert api.post(f"/v1/jobs/{job}/dead-letters/none/discard").status_code == 422
        while (found := api.get(f"/v1/jobs/{job}/lineage", params={"id": "sorting:0:2"})).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert [g["gid"] for g in found.json()] == ["sorting:0:2#1"]
        api.post(f"/v1/jobs/{job}/cancel")
        view = until(api, job, "cancelled")
    assert view["ledger"]["dead"] == 2 and view["ledger"]["in_flight"] == 0 and view["dead_letters"] == 0
    assert api.get(f"/v1/jobs/{job}/lineage", params={"id": "sorting:0:5"}).status_code == 404
    refused = api.post(f"/v1/jobs/{job}/pause")
    assert refused.status_code == 409 and "cancelled" in refused.json()["detail"]


def test_bodies_in_files_are_swept_behind_each_checkpoint(api: httpx.Client, settings: Settings, model_folder: Path) -> None:  # noqa: F811
    job = submit(api, recipe(model_folder, steps=60, train__checkpoint_every=2))
    folder = Path(settings.bodies.removeprefix("dir:")) / job
    most = 0
    with Simulated(settings, job, text="long " * 20_000, delay=0.005):
        while api.get(f"/v1/jobs/{job}").json()["state"] != "done":
            most = max(most, sum(1 for _ in folder.glob("*")) if folder.exists() else 0)
            time.sleep(0.02)
    assert 1 <= most <= 12, "shelves of a few steps"
    deadline = time.monotonic() + 10
    while folder.exists():
        assert time.monotonic() < deadline, "an ended job leaves no bodies"
        time.sleep(0.05)


def test_what_an_ended_job_left_is_swept_at_the_next_start(settings: Settings, model_folder: Path) -> None:
    """A controller died at its end, or a worker came late."""
    client = connect(settings.redis_url)
    ended, running = (create(client, prepare(recipe(model_folder), settings)) for _ in range(2))
    client.hset(JobKeys(ended).state, "snapshot", pack(Root(phase="cancelled")))
    folders = [Path(settings.bodies.removeprefix("dir:")) / job / "3" for job in (ended, running)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "body").write_bytes(b"x")
    Mesh(lambda: connect(settings.redis_url), settings).sweep_ended()
    assert [folder.exists() for folder in folders] == [False, True]


def test_an_evaluation_on_demand(api: httpx.Client, settings: Settings, model_folder: Path) -> None:  # noqa: F811
    """Several samples a prompt: the simulated scorer finds every second one right."""
    sampling = {"max_new_tokens": 4, "temperature": 1.0}
    suite = {"source": {"name": "sorting"}, "size": 3, "at": [], "n": 4, "sampling": sampling}
    job = submit(api, recipe(model_folder, steps=400, eval={"easy": suite}))
    with Simulated(settings, job, delay=0.01):
        until(api, job, "running")
        assert api.post(f"/v1/jobs/{job}/evaluate").status_code == 202
        deadline = time.monotonic() + 20
        while not (evals := api.get(f"/v1/jobs/{job}").json()["evals"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        [found] = evals
        assert found["tag"].startswith("asked-") and found["prompts"] == 3 and found["samples"] == 12
        assert (found["reward"], found["reward_std"], found["pass@1"], found["pass@4"]) == (0.5, 0.5, 0.5, 1.0)
        assert found["pass@2"] == pytest.approx(5 / 6) and "pass@3" not in found
        api.post(f"/v1/jobs/{job}/cancel")
    plain = submit(api, recipe(model_folder))
    assert api.post(f"/v1/jobs/{plain}/evaluate").status_code == 422


def test_suites_have_their_own_data_scorers_and_times(api: httpx.Client, settings: Settings, model_folder: Path) -> None:  # noqa: F811
    own = {"scorers": {"format": {"name": "regex", "params": {"pattern": "a"}}, "exact": {"name": "exact_match"}}}
    sampling = {"max_new_tokens": 2, "temperature": 0.5}
    suites = {
        "plain": {"source": {"name": "sorting"}, "size": 2, "at": ["end"]},
        "strict": {
            "source": {"name": "sorting", "params": {"seed": 3}},
            "size": 3,
            "at": [],
            "every": 2,
            "n": 2,
            "sampling": sampling,
            "reward": own | {"aggregation": "max"},
        },
    }
    job = submit(api, recipe(model_folder, steps=5, eval=suites))
    with Simulated(settings, job):
        view = until(api, job, "done")
    found = {(e["suite"], e["tag"]): e for e in view["evals"]}
    assert set(found) == {("plain", "end"), ("strict", "step-2"), ("strict", "step-4")}
    assert found["plain", "end"]["versions"] == {"policy": 5} and found["plain", "end"]["samples"] == 2
    strict = found["strict", "step-4"]
    assert strict["versions"] == {"policy": 4} and (strict["prompts"], strict["samples"]) == (3, 6)
    assert strict["reward/format"] == strict["reward/exact"] == strict["reward"] == 0.5
    assert view["ledger"]["issued"] == 10 and view["dead_letters"] == 0
    wrong = api.post(f"/v1/jobs/{submit(api, recipe(model_folder, eval=suites))}/evaluate", params={"suite": "strickt"})
    assert wrong.status_code == 422 and "strict" in wrong.text


def test_a_trace_shows_who_did_what_when(api: httpx.Client, settings: Settings, model_folder: Path) -> None:  # noqa: F811
    job = submit(api, recipe(model_folder, steps=3, data__batch_size=2))
    began = time.time()
    with Simulated(settings, job, delay=0.05):
        until(api, job, "done")
    trace = api.get(f"/v1/jobs/{job}/trace", params={"step": 2}).json()
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    of = {name: [e for e in spans if e["name"] == name] for name in ("rollout.policy", "reward.exact", "train", "commit")}
    assert all(of.values()) and {processes[e["pid"]] for e in of["rollout.policy"]} == {"rollout simulated"}
    groups = [e for e in spans if e["cat"] == "groups"]
    assert len(groups) == 2 and len({(e["pid"], e["tid"]) for e in groups}) == 2, "what overlaps lies in lanes of its own"
    for span in spans:
        assert began * 1e6 < span["ts"] < time.time() * 1e6 and 0 <= span["dur"] < 20e6
    order = [min(e["ts"] for e in of[name]) for name in ("rollout.policy", "reward.exact", "train")]
    assert order == sorted(order) and min(g["ts"] for g in groups) <= order[0]
    assert api.get(f"/v1/jobs/{job}/trace", params={"step": 4}).status_code == 404
