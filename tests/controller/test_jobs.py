"""Bad input: each gets an error that names the field, the value and what is legal, and nothing is written."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.controller.data.intake import BadPrompt, Intake
from services.controller.data.order import DataOrder
from services.controller.data.record import Record
from services.controller.data.sources import open_source
from services.controller.jobs import Job, create, prepare
from services.controller.lifecycles.state import EvalRun, Gone, Root
from services.controller.pins import Pins
from shared.config.compose import compose, listed
from shared.config.problems import BadInput
from shared.config.sections import Component, Data
from shared.config.settings import Settings
from shared.weights.store import WeightStore
from shared.wire.client import connect
from shared.wire.codec import pack
from shared.wire.keys import JOBS, JobKeys
from tests.conftest import recipe
from tests.models.tiny_folders import make_folder as make_tiny
from tests.models.tiny_pipelines import TINY, drawn
from tests.models.tiny_sd3 import make_folder as make_pipeline


def problem(document: Any, settings: Settings) -> str:
    with pytest.raises(BadInput) as caught:
        prepare(document, settings)
    return str(caught.value)


def jsonl(path: Path, *rows: Any) -> dict[str, Any]:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return {"name": "jsonl", "params": {"path": str(path)}}


SUITE: dict[str, Any] = {"source": {"name": "sorting"}, "size": 2}
ROWS = tuple({"prompt": f"{i}>", "answer": str(i)} for i in range(4))


def test_a_good_recipe_passes(settings: Settings, model_folder: Path) -> None:
    job = prepare(recipe(model_folder), settings)
    assert isinstance(job, Job) and job.doc.plan.max_inflight == 2 and job.doc.warnings == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"domain": "arr"}, ["domain", "'arr'", "did you mean 'ar'"]),
        ({"rollout__groupsize": 4}, ["rollout.groupsize", "unknown key", "did you mean 'group_size'"]),
        ({"train__optimizer__learning_rate": 1}, ["train.optimizer.learning_rate", "legal: betas"]),
        ({"train__optimizer__betas": [0.9, "much"]}, ["train.optimizer.betas.1", "'much'", "number"]),
        ({"eval": {"x": SUITE | {"sampling": {"max_new_tokens": "few"}}}}, ["eval.x.sampling.max_new_tokens", "'few'"]),
        ({"steps": 0}, ["steps", "greater than or equal to 1", "0"]),
        ({"rollout__sampling__max_new_tokens": 500}, ["rollout.sampling.max_new_tokens", "500", "less than", "128"]),
        ({"rollout__sampling__temperature": 0}, ["rollout.sampling.temperature", "greedy"]),
        ({"rollout__sampling__top_k": 5}, ["top_k", "whole distribution"]),
        ({"reward__scorers": {"x": {"name": "exact_mach"}}}, ["reward.scorers.x.name", "did you mean 'exact_match'"]),
        ({"reward__scorers": {"x": {"name": "length"}}}, ["reward.scorers.x.params.target", "required"]),
        ({"reward__scorers": {"a.b": {"name": "exact_match"}}}, ["reward.scorers.a.b", "holds no"]),
        ({"algorithm__params": {"cliprange": 1}}, ["algorithm.params.cliprange", "did you mean 'clip_range'"]),
        ({"eval": {"x": SUITE | {"n": 4}}}, ["eval.x.n", "4", "greedy", "temperature above 0"]),
        (
            {"eval": {"x": SUITE | {"reward": {"scorers": {"y": {"name": "contain"}}}}}},
            ["eval.x.reward.scorers.y.name", "contains"],
        ),
        ({"eval": {"a.b": SUITE}}, ["eval.a.b", "holds no"]),
        ({"eval": {"x": {"source": {"name": "sorting", "params": {"size": 1}}, "size": 2}}}, ["eval.x.size", "at most 1"]),
        ({"data__source": {"name": "sort"}}, ["data.source.name", "did you mean 'sorting'"]),
        ({"data__source": {"name": "sorting", "params": {"digits": 0}}}, ["data.source.params.digits", "0"]),
        (
            {"data__source": {"name": "sorting", "params": {"size": 1}}},
            ["data.batch_size", "larger than the data", "1 to 1"],
        ),
        (
            {"schedule": {"weight_sync_interval": 3}},
            ["schedule.max_staleness", "at least weight_sync_interval - 1 = 2"],
        ),
        ({"schedule": {"max_inflight": 1}}, ["schedule.max_inflight", "no batch could form"]),
        ({"schedule": {"max_staleness": 2}}, ["schedule.max_staleness", "async_ar"]),
        ({"data__source": {"name": "reasoning_gym", "params": {"dataset": "no_such"}}}, ["no_such", "refused"]),
        ({"placement__layout": "colocate"}, ["placement.layout", "colocate", "separate, trainside"]),
        ({"placement": {"layout": "trainside", "rollout": 2}}, ["placement.rollout", "2", "trainer's ranks"]),
        (
            {"domain": "async_ar", "placement__layout": "trainside", "schedule__max_staleness": 2},
            ["schedule.max_staleness", "take turns", "legal: 0"],
        ),
        ({"schedule__eval_share": 0.0}, ["schedule.eval_share", "greater than 0"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_values(settings: Settings, model_folder: Path, client: Any, changes: dict[str, Any], words: list[str]) -> None:
    said = problem(recipe(model_folder, **changes), settings)
    assert all(word in said for word in words), said
    assert not client.exists(JOBS)


def test_all_problems_are_listed_at_once(settings: Settings, model_folder: Path) -> None:
    said = problem(recipe(model_folder, steps=-1, seed=-1, name=3), settings)
    assert said.count("\n") == 2


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_a_model_folder_without_its_files(settings: Settings, model_folder: Path, tmp_path: Path, missing: str) -> None:
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    (broken / missing).unlink()
    said = problem(recipe(broken), settings)
    assert "model.path" in said and missing in said


@pytest.mark.parametrize("path", ["/etc", "../../etc", "/no/such"])
def test_paths_lie_below_the_roots(settings: Settings, path: str) -> None:
    said = problem(recipe(path), settings)
    assert "not below a configured root" in said and str(settings.roots[0]) in said


def test_a_path_that_leaves_a_root_by_a_link_is_refused(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    assert "not below a configured root" in problem(recipe(tmp_path / "link"), settings)


@pytest.mark.parametrize("job", ["job:none", "job:../x"])
def test_a_model_of_a_job_that_published_nothing(settings: Settings, job: str) -> None:
    assert "model.path" in problem(recipe(job), settings)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((*ROWS[:2], "{broken\n", *ROWS[2:]), ["data.jsonl line 3", "not valid JSON"]),
        ((*ROWS, "[1]\n"), ["line 5", "not an object"]),
        ((*ROWS, {"answer": "1"}), ["line 5", "'prompt' is missing", "legal: answer"]),
        ((*ROWS, {"prompt": ""}), ["line 5", "not empty"]),
        ((*ROWS, '{"prompt": "\\ud83d>"}\n'), ["line 5", "surrogate"]),
        ((*ROWS, '{"prompt": "1>", "answer": ["\\ude00"]}\n'), ["line 5", "surrogate"]),
        ((*ROWS, {"prompt": "9" * 200}), ["data.source record 5", "200 tokens", "at most 124"]),
        ((*ROWS, {"prompt": [{"role": "user", "content": "x"}]}), ["record 5", "data.chat"]),
        (ROWS[:1], ["data.batch_size", "larger than the data"]),
        ((), ["holds no records"]),
    ],
    ids=["broken", "list", "missing", "empty", "surrogate", "deep-surrogate", "too-long", "messages", "few", "none"],
)
def test_data_files(settings: Settings, model_folder: Path, tmp_path: Path, rows: Any, words: list[str]) -> None:
    said = problem(recipe(model_folder, data__source=jsonl(tmp_path / "data.jsonl", *rows)), settings)
    assert all(word in said for word in words), said


def test_duplicate_ids_are_named(settings: Settings, model_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1>", "id": "a"}, {"prompt": "2>", "id": "b"}, {"prompt": "3>", "id": "a"}]
    source = jsonl(tmp_path / "data.jsonl", *rows)
    source["params"]["id"] = "id"
    said = problem(recipe(model_folder, data__source=source), settings)
    assert "line 3" in said and "'a'" in said and "twice" in said


def test_emoji_and_other_scripts_are_fine(settings: Settings, model_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in ("😀>", "日本>", "e\u0301>", "\u200d>")]
    prepare(recipe(model_folder, data__source=jsonl(tmp_path / "data.jsonl", *rows)), settings)


def test_a_group_of_one_with_a_group_baseline_warns(settings: Settings, model_folder: Path) -> None:
    [warning] = prepare(recipe(model_folder, rollout__group_size=1), settings).doc.warnings
    assert "rollout.group_size is 1" in warning


def test_a_domain_without_engines_is_refused_by_name(settings: Settings, model_folder: Path) -> None:
    document = recipe(model_folder, domain="agentic", environment={"name": "tools"})
    assert "its engines are not there yet" in problem(document, settings)


def test_one_key_makes_one_job(settings: Settings, model_folder: Path, client: Any) -> None:
    jobs = [create(client, prepare(recipe(model_folder), settings), "key") for _ in range(2)]
    assert jobs[0] == jobs[1] and client.hlen(JOBS) == 1


def test_two_jobs_that_run_do_not_share_a_name(settings: Settings, model_folder: Path, client: Any) -> None:
    first = create(client, prepare(recipe(model_folder, name="mine"), settings))
    with pytest.raises(BadInput, match=rf"name: a job of this name has not ended .*'mine'.*cancel job {first}"):
        create(client, prepare(recipe(model_folder, name="mine"), settings), "key")
    assert client.hlen(JOBS) == 1 and len(client.keys("unimesh:*:doc")) == 1 and not client.exists("unimesh:idempotency:key")
    unnamed = [create(client, prepare(recipe(model_folder), settings)) for _ in range(2)]
    client.hset(JobKeys(first).state, "snapshot", pack(Root(phase="done")))
    again = create(client, prepare(recipe(model_folder, name="mine"), settings), "key")
    assert {raw.decode() for raw in client.hkeys(JOBS)} == {first, again, *unnamed}


def test_a_repetition_is_answered_whatever_bears_the_name_now(settings: Settings, model_folder: Path, client: Any) -> None:
    first = create(client, prepare(recipe(model_folder, name="mine"), settings), "key")
    client.hset(JobKeys(first).state, "snapshot", pack(Root(phase="done")))
    second = create(client, prepare(recipe(model_folder, name="mine"), settings))
    assert create(client, prepare(recipe(model_folder, name="mine"), settings), "key") == first
    assert client.hget("unimesh:names", "mine").decode() == second and client.hlen(JOBS) == 2


def test_of_many_submissions_at_once_with_one_name_one_is_taken(settings: Settings, model_folder: Path, redis_url: str) -> None:
    jobs = [prepare(recipe(model_folder, name="mine"), settings) for _ in range(8)]

    def enter(job: Job) -> str:
        try:
            return create(connect(redis_url), job)
        except BadInput:
            return ""

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(enter, jobs))
    assert len([name for name in found if name]) == 1 and found.count("") == 7


def test_scorers_ask_only_where_they_may(settings: Settings, model_folder: Path) -> None:
    limited = replace(settings, scorer_urls=("https://judge.example/", "http://127.0.0.1:9000/"))
    far = {"far": {"name": "remote_http", "params": {"url": "http://169.254.169.254/latest"}}}
    said = problem(recipe(model_folder, reward={"scorers": far}), limited)
    assert "reward.scorers.far.params.url" in said and "https://judge.example/" in said
    said = problem(recipe(model_folder, eval={"x": SUITE | {"reward": {"scorers": far}}}), limited)
    assert "eval.x.reward.scorers.far.params.url" in said
    for url in (
        "https://judge.example.evil.org/",
        "https://judge.example@evil.org/",
        "http://judge.example/",
        "http://127.0.0.1:9",
    ):
        far["far"]["params"] = {"url": url}
        assert "scorers may not ask there" in problem(recipe(model_folder, reward={"scorers": far}), limited)
    below = replace(settings, scorer_urls=("https://judge.example/v1",))
    for url in ("https://judge.example/v12", "https://judge.example/v1/../admin"):
        far["far"]["params"] = {"url": url}
        assert "scorers may not ask there" in problem(recipe(model_folder, reward={"scorers": far}), below)
    judge = {"j": {"name": "llm_judge", "params": {"base_url": "http://169.254.169.254/v1", "model": "m"}}}
    assert "reward.scorers.j.params.base_url" in problem(recipe(model_folder, reward={"scorers": judge}), limited)
    far["far"]["params"] = {"url": "https://judge.example/score"}
    prepare(recipe(model_folder, reward={"scorers": far}), limited)


def test_a_version_that_an_evaluation_needs_is_not_collected(settings: Settings) -> None:
    store = WeightStore(settings.weights("j"), "policy")
    for version in range(5):
        store.publish(1, version, [("model.safetensors", [b"x"])])
    pins = Pins(settings, "j", "me", live=False)
    run = EvalRun(suite="s", tag="step-1", step=1, versions={"policy": 1}, size=1)
    assert pins.hold(Root(evals=(run,), published={"policy": 4})) == []
    assert store.collect(1, keep=2) == [0, 2] and store.has(1, 1)
    pins.release(Root())
    assert store.collect(1, keep=2) == [1]
    late = Pins(settings, "j", "another", live=False)
    assert late.hold(Root(cohorts={3: {"policy": 1}, 4: {"policy": 5}}, published={"policy": 4})) == [Gone("policy", 1)]
    assert late.hold(Root(cohorts={3: {"policy": 1}}, published={"policy": 4})) == [], "said once"


def test_a_prompt_of_megabytes(settings: Settings, model_folder: Path, tmp_path: Path) -> None:
    """Named like any that is too long, and not printed."""
    source = jsonl(tmp_path / "data.jsonl", *ROWS, {"prompt": "1 " * 1_500_000})
    said = problem(recipe(model_folder, data__source=source), settings)
    assert "data.source record 5" in said and "at most 124" in said and len(said) < 2000
    prepare(recipe(model_folder, data__source=source, data__on_long="drop"), settings)


# recipes and data ------------------------------------------------------------------------------------------------------------


def test_a_submission_that_broke_off_is_finished_by_its_repetition(settings: Settings, model_folder: Path, client: Any) -> None:
    first = create(client, prepare(recipe(model_folder), settings), "key")
    client.hdel(JOBS, first)  # as if the first had been killed before its last write
    assert create(client, prepare(recipe(model_folder), settings), "key") == first
    assert [name.decode() for name in client.hkeys(JOBS)] == [first]


def test_prompt_and_target_must_fit_together(settings: Settings, model_folder: Path, tmp_path: Path) -> None:
    rows = ({"prompt": "1>", "text": "1"}, {"prompt": "2" * 100, "text": "3" * 60})
    source = jsonl(tmp_path / "data.jsonl", *rows)
    source["params"]["target"] = "text"
    document = recipe(model_folder, domain="sft", data__source=source, algorithm={"name": "cross_entropy"})
    for section in ("rollout", "reward"):
        del document[section]
    said = problem(document, settings)
    assert "data.source record 2" in said and "100 + 61 tokens" in said and "at most 128 fit" in said


def test_prompts_that_their_encoder_would_cut(settings: Settings, tmp_path: Path) -> None:
    """Refused before a model loads, dropped when they are drawn, or cut: then the plan says so."""
    folder, settings = make_pipeline(tmp_path / "pictures", 0), replace(settings, roots=(*settings.roots, tmp_path))
    rows = [{"prompt": "a red disc"}, {"prompt": "red " * 100}, *({"prompt": "disc"} for _ in range(30))]
    path = jsonl(tmp_path / "data.jsonl", *rows)["params"]["path"]
    overrides = [f"model.path={folder}", *(f"{at}.source.params.path={path}" for at in ("data", "eval.fixed"))]

    def warned(*more: str) -> str:
        return " ".join(prepare(compose("diffusion/sd3_flow_grpo", [*overrides, *more]), settings).doc.warnings)

    with pytest.raises(
        BadInput, match=r"record 2: the prompt has 10\d tokens: the text encoder reads 77; legal: a text of 1 to 77"
    ):
        warned()
    assert "tokens of a prompt" not in warned("+data.on_long=drop")
    assert "truncate_right: the text encoder reads 77 tokens of a prompt" in warned("+data.on_long=truncate_right")
    with pytest.raises(BadInput, match=r"data.on_long.*cuts the end.*refuse, drop or truncate_right"):
        warned("+data.on_long=truncate_left")
    for name in ("tokenizer.json", "vocab.json"):
        (folder / "tokenizer" / name).unlink(missing_ok=True)
    assert "reads 77 tokens of a prompt, and its tokenizer cannot be read here" in warned()
    alphabet = {c: i for i, c in enumerate("Ġredisca")}
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(alphabet | {"re": 8, "red": 9}))
    (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\nr e\nre d\n")
    with pytest.raises(BadInput, match=r"record 2: the prompt has 200 tokens"):
        warned()


@pytest.mark.parametrize("name", listed())
def test_every_recipe_composes_and_is_valid(settings: Settings, model_folder: Path, tmp_path: Path, name: str) -> None:
    """With what it leaves to its user: a model, and data where it names a file."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"prompt": "a cat", "answer": "a", "messages": talk, "picture": "a.png", "reference": "a.png", "domain": "cats"}
    path = jsonl(tmp_path / "data.jsonl", *({"question": f"{i}?"} | row for i in range(256)))["params"]["path"]
    drawn(8, 8).save(tmp_path / "a.png")
    media = name.startswith("diffusion/") or name in ("sft/pictures", "sft/painter")
    kind = max((family for family in TINY if name.startswith(f"diffusion/{family}_")), key=len, default="sd3")
    if kind != "sd3":
        folder = make_tiny(tmp_path / "pipeline", kind, 0)
    else:
        folder = make_pipeline(tmp_path / "pictures", 0) if media else model_folder
    overrides = [f"model.path={folder}"]
    settings = replace(settings, roots=(*settings.roots, tmp_path))
    if media or name in ("ar/smollm2", "sft/chat"):
        suite = "fixed" if name.startswith("diffusion/") else "held_out"
        overrides += [f"data.source.params.path={path}", f"eval.{suite}.source.params.path={path}"]
    if name.endswith("_opd"):
        overrides.append(f"+algorithm.params.teachers.cats={folder}")
    prepare(compose(name, overrides), settings)


@pytest.mark.parametrize(
    ("name", "overrides", "word"),
    [
        ("ar/sorte", [], "did you mean 'ar/sort'"),
        ("ar/sort", [], "model.path: must be given"),
        ("ar/sort", ["model.path=${oc.env:HOME}"], "resolvers are refused"),
        ("ar/sort", ["a=b=c=["], "overrides"),
    ],
)
def test_recipes_that_do_not_compose(name: str, overrides: list[str], word: str) -> None:
    with pytest.raises(BadInput, match=r".*"):
        try:
            compose(name, overrides)
        except BadInput as error:
            assert word in str(error), str(error)
            raise


def test_a_recipe_that_is_no_yaml_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "ar").mkdir()
    (tmp_path / "ar" / "broken.yaml").write_text("model: {path: ?}\n")
    with pytest.raises(BadInput, match=r"recipe.*ar/broken.*line 1, column 15"):
        compose("ar/broken", folder=tmp_path)


def test_overrides_follow_hydras_grammar(model_folder: Path) -> None:
    document = compose("ar/sort", [f"model.path={model_folder}", "train.optimizer.betas=[0.5,0.6]", "+deterministic=true"])
    assert document["train"]["optimizer"]["betas"] == [0.5, 0.6] and document["deterministic"] is True


def test_the_cursor_is_exact_over_epochs() -> None:
    order = DataOrder("s", 10, shuffle=True, seed=3)
    epochs = [[order.place(e * 10 + i)[1] for i in range(10)] for e in range(3)]
    assert all(sorted(e) == list(range(10)) for e in epochs) and epochs[0] != epochs[1]
    assert order.root(25) == f"s:2:{epochs[2][5]}" == DataOrder("s", 10, True, 3).root(25)


def test_a_jsonl_row_is_read_by_its_number(settings: Settings, tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": i} for i in range(50)]
    source = open_source(Component(**jsonl(tmp_path / "d.jsonl", *rows)), settings, "data.source")
    assert [source.get(i).prompt for i in (49, 0, 7)] == ["p49", "p0", "p7"] and source.get(7).metadata == {"answer": 7}


def test_the_careless_teacher_is_right_three_times_in_ten(settings: Settings) -> None:
    source = open_source(Component(name="sorting"), settings, "data.source")
    rows = [source.get(i) for i in range(2000)]
    right = sum(r.target == r.metadata["answer"] for r in rows) / 2000
    assert 0.26 < right < 0.34 and source.get(7) == rows[7]


@pytest.mark.parametrize("raw", [True, False])
def test_prompts_are_tokenized_as_transformers_does(model_folder: Path, raw: bool) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_folder)
    intake = Intake(model_folder, _data(chat=not raw, system=None if raw else "be brief"), 8)
    if raw:
        assert intake.prompt(Record(prompt="12>")).tokens == theirs("12>").input_ids
        return
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "12>"}]
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert intake.prompt(Record(prompt="12>")).tokens == wanted


def test_stop_tokens_come_from_the_models_files(model_folder: Path) -> None:
    assert Intake(model_folder, _data(), 8).stop_tokens == (1,)


def test_a_prompt_too_long_at_intake_is_named(model_folder: Path) -> None:
    with pytest.raises(BadPrompt, match="121 tokens: at most 120"):
        Intake(model_folder, _data(), 8).prompt(Record(prompt="1" * 121))


def _data(chat: bool = False, system: str | None = None) -> Data:
    return Data(source=Component(name="sorting"), batch_size=1, chat=chat, system=system)
