"""Trackers get every step and evaluation once, in order, also over restarts; one that fails never hurts the job."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.controller.jobs import create, prepare
from services.controller.tracking import Tracking
from shared.config.settings import Settings
from shared.wire.client import connect
from shared.wire.codec import pack
from shared.wire.keys import JobKeys
from tests.conftest import recipe
from tests.controller.test_api import api, submit, until  # noqa: F401  (the fixture)
from tests.simulated import Simulated

Point = tuple[str, int, float]


def tensorboard(folder: Path) -> Iterator[Point]:
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at + 12 <= len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            yield from ((v.tag, event.step, v.simple_value) for v in event.summary.value)


def wandb_records(folder: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, held = path.read_bytes(), 7, b""
        assert data[:4] == b":W&B"
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack_from("<IHB", data, at)
            held += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):
                yield wandb_internal_pb2.Record.FromString(held)
                held = b""


def test_every_tracker_gets_every_series(
    api: httpx.Client,  # noqa: F811
    settings: Settings,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(settings.state / "tracking" / "trackio"))
    wanted = ["tensorboard", "wandb", {"name": "trackio", "params": {"project": "p"}}, "mlflow"]
    suite = {"easy": {"source": {"name": "sorting"}, "size": 2, "every": 2}}
    job = submit(api, recipe(model_folder, steps=4, eval=suite, logging={"trackers": wanted}))
    with Simulated(settings, job):
        until(api, job, "done")
    folder = settings.tracking(job)
    deadline = time.monotonic() + 60
    while not (folder / "position.json").exists() or json.loads((folder / "position.json").read_text())["step"] < 4:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    [warnings] = [[e for e in notes(settings, job) if "tracker" in e]]
    assert warnings == []
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["series"] == "train"] == [1, 2, 3, 4]
    evaluated = [(r["step"], r["version/policy"]) for r in rows if r["series"] == "eval/easy"]
    assert sorted(evaluated) == [(0, 0), (2, 2), (4, 4)] and evaluated == sorted(evaluated)
    assert all(r["reward"] == 0.5 and r["loss"] == 0.5 for r in rows if r["series"] == "train")

    points = list(tensorboard(folder / "tensorboard"))
    assert [(s, v) for t, s, v in points if t == "train/reward"] == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert [s for t, s, _ in points if t == "eval/easy/pass@1"] == [0, 2, 4]

    until_finished(folder)
    records = list(wandb_records(folder))
    axes = {
        (r.metric.name or r.metric.glob_name): r.metric.step_metric for r in records if r.WhichOneof("record_type") == "metric"
    }
    assert axes["train/*"] == "train/step" and axes["eval/easy/*"] == "eval/easy/step"
    logged = [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    assert [r["train/step"] for r in logged if "train/step" in r] == [1, 2, 3, 4]

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{settings.state / 'tracking' / 'mlflow' / 'mlflow.db'}")
    number = client.get_experiment_by_name("unimesh")
    assert number is not None
    [run] = client.search_runs([number.experiment_id])
    while run.info.status != "FINISHED":  # the last one that is closed: the others' files are whole then
        assert time.monotonic() < deadline
        time.sleep(0.1)
        run = client.get_run(run.info.run_id)
    assert [m.step for m in client.get_metric_history(run.info.run_id, "train/reward")] == [1, 2, 3, 4]
    assert run.data.params["rollout.group_size"] == "2"

    import sqlite3

    with sqlite3.connect(settings.state / "tracking" / "trackio" / "p.db") as base:
        kept = [(step, json.loads(m)) for step, m in base.execute("SELECT step, metrics FROM metrics ORDER BY id")]
    assert [step for step, m in kept if "train/reward" in m] == [1, 2, 3, 4]


def until_finished(folder: Path) -> None:
    """W&B's own process writes the end of its file."""
    deadline = time.monotonic() + 30
    while not any(r.WhichOneof("record_type") == "exit" for r in wandb_records(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def notes(settings: Settings, job: str) -> list[str]:
    rows = connect(settings.redis_url).xrange(JobKeys(job).events)
    return [fields[b"text"].decode() for _, fields in rows]


class History:
    """A job's steps in Redis, without a job that runs."""

    def __init__(self, settings: Settings, model: Path, trackers: list[str]) -> None:
        self.settings, self.client = settings, connect(settings.redis_url)
        job = prepare(recipe(model, steps=50, logging={"trackers": trackers}), settings)
        create(self.client, job)
        self.doc, self.keys = job.doc, job.keys
        self.folder = settings.tracking(job.doc.id)

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            fields = {"step": number, "seq": number, "at": 1.0, "versions": {"policy": number}, "loss": float(number)}
            self.client.xadd(self.keys.steps, {"m": pack(fields)})

    def told(self) -> None:
        """One controller's time with the job."""
        tracking = Tracking(self.client, self.doc, self.settings)
        with tracking.running():
            pass

    def lines(self) -> list[int]:
        return [json.loads(line)["step"] for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def test_the_step_never_goes_backwards_after_a_return_to_a_checkpoint(settings: Settings, model_folder: Path) -> None:
    history = History(settings, model_folder, ["tensorboard"])
    history.steps(1, 2, 3, 4, 5)
    history.told()
    history.steps(3, 4, 5, 6)
    history.told()
    history.told()
    assert history.lines() == [1, 2, 3, 4, 5, 6]
    assert [s for t, s, _ in tensorboard(history.folder / "tensorboard") if t == "train/loss"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("tail", ['{"series": "train", "step": 3, "at"', "nothing"])
def test_a_controller_killed_between_file_and_position(settings: Settings, model_folder: Path, tail: str) -> None:
    """The file holds what the position does not know of: nothing is doubled, a torn line is written again."""
    history = History(settings, model_folder, [])
    history.steps(1, 2)
    history.told()
    before = (history.folder / "position.json").read_text()
    history.steps(3, 4)
    history.told()
    (history.folder / "position.json").write_text(before)
    if tail != "nothing":
        path = history.folder / "metrics.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]) + tail)
    history.told()
    assert history.lines() == [1, 2, 3, 4]


def test_what_redis_did_not_answer_is_told_later(settings: Settings, model_folder: Path) -> None:
    """It goes away between the steps and the evaluations."""
    history = History(settings, model_folder, [])
    history.steps(1, 2, 3)
    tracking = Tracking(history.client, history.doc, settings)

    def away() -> list[Any]:
        raise redis.ConnectionError("away")

    real, tracking._evaluations = tracking._evaluations, away  # type: ignore[method-assign]
    with pytest.raises(redis.ConnectionError):
        tracking.tell()
    assert tracking.position.step == 0
    tracking._evaluations = real  # type: ignore[method-assign]
    with tracking.running():
        pass
    assert history.lines() == [1, 2, 3]


def test_two_evaluations_at_one_step_are_both_told(settings: Settings, model_folder: Path) -> None:
    history = History(settings, model_folder, ["tensorboard"])
    for tag in ("step-4", "asked-4"):
        result = {"suite": "easy", "tag": tag, "step": 4, "at": 1.0, "versions": {"policy": 4}, "reward": 0.5}
        history.client.hset(history.keys.evals, f"easy:{tag}", pack(result))
        history.told()
    lines = [json.loads(line) for line in (history.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["tag"]) for row in lines] == [(4, "step-4"), (4, "asked-4")]


def test_a_tracker_that_fails_is_left_out_and_said(settings: Settings, model_folder: Path) -> None:
    history = History(settings, model_folder, ["tensorboard"])
    history.folder.mkdir(parents=True)
    (history.folder / "tensorboard").write_text("in the way")
    history.steps(1, 2)
    history.told()
    assert history.lines() == [1, 2]
    [note] = [n for n in notes(settings, history.doc.id) if "tracker" in n]
    assert "tensorboard is left out" in note and "FileExistsError" in note
