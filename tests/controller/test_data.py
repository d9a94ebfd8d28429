"""Data sources: formats, columns, mixtures, lengths, tails; the same rows in the same order whenever a run stops."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from services.controller.data.intake import TooLong
from services.controller.data.order import DataOrder
from services.controller.data.record import Source
from services.controller.data.sources import open_source
from services.controller.jobs import open_job, prepare
from services.controller.mesh import Mesh
from shared.config.problems import BadInput
from shared.config.sections import Component
from shared.config.settings import Settings
from shared.wire.client import connect
from shared.wire.keys import JobKeys
from tests.conftest import recipe
from tests.controller.test_api import api, submit  # noqa: F401  (the fixture)

ROWS = [{"question": f"{i}>", "gold": str(i), "level": i % 3, "key": f"k{i}"} for i in range(10)]
COLUMNS = {"prompt": "question", "target": "gold", "id": "key", "shuffle": False}


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def written(folder: Path, kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows in a file of this kind, as a source of a recipe."""
    if kind == "saved":
        target = folder / "saved"
        target.mkdir()
        for index, part in enumerate((rows[:4], rows[4:])):
            table = pa.Table.from_pylist(part)
            with (
                pa.OSFile(str(target / f"data-{index}.arrow"), "wb") as sink,
                pa.ipc.new_stream(sink, table.schema) as writer,
            ):
                writer.write_table(table)
        names = [{"filename": f"data-{i}.arrow"} for i in range(2)]
        (target / "state.json").write_text(json.dumps({"_data_files": names}))
        return {"name": "saved_dataset", "params": {"path": str(target), **COLUMNS}}
    path = folder / f"data.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
        return {"name": "parquet", "params": {"path": str(path), **COLUMNS}}
    data = lines(rows)
    data = gzip.compress(data) if kind.endswith("gz") else zstandard.compress(data) if kind.endswith("zst") else data
    path.write_bytes(data)
    return {"name": "jsonl", "params": {"path": str(path), **COLUMNS}}


KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "saved"]


def opened(source: dict[str, Any], settings: Settings) -> Source:
    return open_source(Component(**source), settings, "data.source")


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_records(settings: Settings, tmp_path: Path, kind: str) -> None:
    source = opened(written(tmp_path, kind, ROWS), settings)
    assert source.size == 10 and not source.shuffle
    for row in (9, 0, 5):
        record = source.get(row)
        assert (record.prompt, record.target) == (f"{row}>", str(row))
        assert record.metadata == {"level": row % 3, "key": f"k{row}", "id": f"k{row}"}


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes_are_named_in_every_format(settings: Settings, tmp_path: Path, kind: str) -> None:
    def said(name: str, rows: list[dict[str, Any]], **columns: Any) -> str:
        (tmp_path / name).mkdir()
        source = written(tmp_path / name, kind, rows)
        source["params"] |= columns
        with pytest.raises(BadInput) as caught:
            prepare(recipe(settings.roots[0] / "tiny", data__source=source), settings)
        return str(caught.value)

    text = said("column", ROWS, prompt="questoin")
    assert "'questoin' is missing" in text and "did you mean 'question'" in text and "level" in text
    assert "'k3'" in said("twice", [*ROWS, ROWS[3]]) and "stands twice" in said("again", [*ROWS, ROWS[3]])
    assert "no prompt" in said("empty", [{**ROWS[0], "question": ""}, *ROWS[1:]])
    assert "rows" in said("none", ROWS[:0]) or "records" in said("nothing", ROWS[:0])


def test_line_3012_of_a_compressed_file_is_named(settings: Settings, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}>"} for i in range(4000)]
    data = lines(rows).splitlines(keepends=True)
    data[3011] = b'{"prompt": "x\n'
    path = tmp_path / "many.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(data)))
    with pytest.raises(BadInput, match=r"many\.jsonl\.gz line 3012: not valid JSON"):
        opened({"name": "jsonl", "params": {"path": str(path)}}, settings)
    path.write_bytes(gzip.compress(lines(rows))[:-20])
    with pytest.raises(BadInput, match="cannot be decompressed"):
        opened({"name": "jsonl", "params": {"path": str(path)}}, settings)


def test_a_mixture_meets_its_weights_and_spreads_its_parts(settings: Settings, tmp_path: Path) -> None:
    parts = {
        "files": {**written(tmp_path, "jsonl", ROWS), "weight": 3},
        "made": {"name": "sorting", "params": {"digits": 3}, "weight": 1},
    }
    source = opened({"name": "mixture", "params": {"parts": parts}}, settings)
    records = [source.get(draw) for draw in range(4000)]
    names = [r.metadata["source"] for r in records]
    assert Counter(names) == {"files": 3000, "made": 1000}
    assert all(2 <= Counter(names[i : i + 4])["files"] <= 4 for i in range(0, 3996)), "evenly spread"
    files = [r.prompt for r in records if r.metadata["source"] == "files"]
    assert all(sorted(files[i : i + 10]) == sorted(str(r["question"]) for r in ROWS) for i in range(0, 3000, 10)), (
        "whole epochs"
    )
    assert len({r.prompt for r in records if r.metadata["source"] == "made"}) > 500
    assert [source.get(d) for d in (3999, 17, 1234)] == [records[d] for d in (3999, 17, 1234)]
    with pytest.raises(BadInput, match="a mixture of mixtures"):
        opened({"name": "mixture", "params": {"parts": {"a": {"name": "mixture", "params": {"parts": parts}}}}}, settings)
    with pytest.raises(BadInput, match=r"data\.source\.params\.parts\.a\.name.*did you mean 'sorting'"):
        opened({"name": "mixture", "params": {"parts": {"a": {"name": "sortin"}}}}, settings)


@pytest.mark.parametrize(("tail", "length"), [("wrap", 11), ("drop", 9), ("pad", 12)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_tails(tail: Any, length: int, shuffle: bool) -> None:
    order = DataOrder("s", 11, shuffle, 3, batch_size=3, tail=tail)
    epochs: dict[int, list[int]] = {}
    for draw in range(3 * length):
        epoch, row = order.place(draw)
        epochs.setdefault(epoch, []).append(row)
    assert [len(rows) for rows in epochs.values()] == [length] * 3
    for rows in epochs.values():
        assert len(set(rows)) == min(length, 11)
        assert tail != "pad" or rows[11:] == rows[:1], "filled up with its own first records"
    roots = [order.root(draw) for draw in range(3 * length)]
    assert len(set(roots)) == len(roots), "no two prompts of a run share an id"
    if shuffle:
        assert epochs[0] != epochs[1] != epochs[2]


def test_a_run_that_stops_at_any_step_goes_on_with_the_same_prompts(
    settings: Settings, model_folder: Path, tmp_path: Path
) -> None:
    """Three epochs of five steps: whoever opens the job again, at any draw, reads what the first would have read."""
    source = written(tmp_path, "jsonl", ROWS)
    source["params"]["shuffle"] = True
    job = prepare(recipe(model_folder, data__source=source, data__batch_size=2), settings)

    def prompts(held: Any, first: int, last: int) -> list[Any]:
        return [held.train.source.get(held.train.order.place(draw)[1]).prompt for draw in range(first, last)]

    straight = prompts(job, 0, 30)
    assert [sorted(straight[i : i + 10]) for i in (0, 10, 20)] == [sorted(str(r["question"]) for r in ROWS)] * 3
    for stop in range(0, 30, 2):
        again = open_job(job.doc, settings)
        assert prompts(again, stop, 30) == straight[stop:]


@pytest.mark.parametrize("how", ["refuse", "drop", "truncate_left", "truncate_right"])
def test_prompts_that_are_too_long(settings: Settings, model_folder: Path, tmp_path: Path, how: str) -> None:
    long = {"question": "123456789>", "gold": "x", "level": 0, "key": "long"}
    changes: dict[str, Any] = {"data__max_prompt_tokens": 4, "data__on_long": how}
    document = recipe(model_folder, data__source=written(tmp_path, "jsonl", [*ROWS, long]), **changes)
    if how == "refuse":
        with pytest.raises(BadInput, match=r"data\.source record 11: the prompt has 10 tokens: at most 4 fit"):
            prepare(document, settings)
        return
    job = prepare(document, settings)
    if how == "drop":
        with pytest.raises(TooLong):
            job.train.intake.prompt(job.train.source.get(10))
        return
    prompt = job.train.intake.prompt(job.train.source.get(10))
    assert len(prompt.tokens) == 4 and prompt.text == ("789>" if how == "truncate_left" else "1234")


def test_a_job_whose_data_changed_waits_and_says_so_once(
    api: httpx.Client,  # noqa: F811
    settings: Settings,
    model_folder: Path,
    tmp_path: Path,
) -> None:
    """Another controller takes the job over and finds other data: it runs nothing, and goes on once the data is back."""
    document = recipe(model_folder, data__source=written(tmp_path, "jsonl", ROWS))
    job = submit(api, document)
    client, keys = connect(settings.redis_url), JobKeys(job)
    deadline = time.monotonic() + 10
    while not client.exists(keys.lease):  # the first controller runs it
        assert time.monotonic() < deadline
        time.sleep(0.02)
    path = tmp_path / "data.jsonl"
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"9>"', b'"8>"'))
    other = Mesh(lambda: connect(settings.redis_url), settings)
    for _ in range(3):
        other.refused = {k: (why, 0.0) for k, (why, _) in other.refused.items()}
        other.look()
    assert not other.runners
    texts = [fields[b"text"].decode() for _, fields in client.xrange(keys.events)]
    notes = [text for text in texts if "not what the job began with" in text]
    assert len(notes) == 1 and "data.source" in notes[0]
    path.write_bytes(before)
    other.refused = {k: (why, time.monotonic()) for k, (why, _) in other.refused.items()}
    other.look()
    assert list(other.runners) == [job] and not other.refused
    for runner, thread in other.runners.values():
        runner.stop()
        thread.join(20)
