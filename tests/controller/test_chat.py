"""Conversations to imitate: which tokens count, against transformers' own marks, and what is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from services.controller.data.chat import BadChat, ChatTemplate
from services.controller.data.intake import BadPrompt, Intake, TooLong
from services.controller.data.record import Record
from services.controller.data.sources import open_source
from services.controller.jobs import prepare
from shared.config.problems import BadInput
from shared.config.sections import Component, SftData
from shared.config.settings import Settings
from shared.models.ar.tiny import make_tokenizer
from tests.conftest import recipe

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = (  # as templates of reasoning models do: what was thought before is left out later
    "{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
PLAIN = (  # ends no turn with a token
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    found = [] if system is None else [{"role": "system", "content": system}]
    return [*found, *({"role": "user" if i % 2 == 0 else "assistant", "content": c} for i, c in enumerate(contents))]


TALKS = [
    talk("hi", "hello"),
    talk("a", "b", "c", "d"),
    talk("a", "b", "c", "d", "and?"),
    talk("hi", "  spaces\nand lines  ", "ok", "", system="be brief"),
    talk("ü\u00e9\U0001f600", "\U0001f600 x"),
]


def intake(folder: Path, template: str, name: str = "chat", **data: Any) -> Intake:
    """The tiny model's tokenizer with ChatML's tokens, of which <|im_end|> ends what is generated."""
    target = folder.parent / name
    if not target.exists():
        tokenizer = make_tokenizer()
        marks = [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
        tokenizer.eos_token = "<|im_end|>"
        tokenizer.save_pretrained(target)
        config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": tokenizer.eos_token_id}
        (target / "config.json").write_text(json.dumps(config))
    (target / "chat_template.jinja").write_text(template)
    section = SftData(source=Component(name="x"), batch_size=1, chat=True, **data)
    return Intake(target, section, 1)


def record(messages: list[dict[str, Any]]) -> Record:
    return Record(prompt=messages, conversation=True)


def learnt(intake: Intake, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    example = intake.example(record(messages))
    assert len(example.mask) == len(example.target) and example.mask[0] and example.mask[-1]
    return example.prompt.tokens + example.target, [0] * len(example.prompt.tokens) + [int(m) for m in example.mask]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by-prefix", "by-marks"])
@pytest.mark.parametrize("messages", TALKS, ids=range(len(TALKS)))
def test_the_tokens_that_count_are_those_that_transformers_marks(
    model_folder: Path, template: str, messages: list[dict[str, Any]]
) -> None:
    mine = intake(model_folder, template)
    theirs = AutoTokenizer.from_pretrained(mine.files)
    wanted = theirs.apply_chat_template(
        messages, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    ids, mask = wanted["input_ids"], wanted["assistant_masks"]
    tokens, counts = learnt(mine, messages)
    assert tokens == ids[: len(tokens)] and counts == mask[: len(tokens)] and not any(mask[len(tokens) :])


def test_the_prompt_is_what_a_rollout_would_get(model_folder: Path) -> None:
    """The tokens before the first turn are those of the same messages as a prompt."""
    mine = intake(model_folder, CHATML)
    example = mine.example(record(talk("hi", "yes", system="s")))
    assert example.prompt == mine.prompt(Record(prompt=talk("hi", system="s")))
    assert mine.decode(example.target) == "yes" and example.target[-1] == mine.stop_tokens[0]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_messages_of_weight_0_and_earlier_turns_do_not_count(model_folder: Path, template: str) -> None:
    messages = talk("a", "bb", "c", "dd")
    first = [m | ({"weight": 0} if m["content"] == "bb" else {}) for m in messages]
    _, all_turns = learnt(intake(model_folder, template), messages)
    tokens, second = learnt(intake(model_folder, template), first)
    again, last = learnt(intake(model_folder, template, learn="last"), messages)
    assert sum(all_turns) == 6 and sum(second) == 3 and second == last and tokens == again
    with pytest.raises(BadPrompt, match="weight 0"):
        intake(model_folder, template).example(record([m | {"weight": 0} for m in messages]))
    with pytest.raises(BadPrompt, match=r"\[0.5, 1\].*0 or 1"):
        intake(model_folder, template).example(record([messages[0], messages[1] | {"weight": 0.5}, *messages[2:]]))


def test_a_template_that_forgets_is_refused_unless_the_last_turn_alone_is_learnt(model_folder: Path) -> None:
    messages = talk("a", "b", "c", "d")
    with pytest.raises(BadPrompt, match=r"message 2.*longer conversation.*data.learn"):
        intake(model_folder, FORGETFUL).example(record(messages))
    mine = intake(model_folder, FORGETFUL, learn="last")
    example = mine.example(record(messages))
    assert example.prompt.text.endswith("user:c<|im_end|>assistant:") and all(example.mask)
    with pytest.raises(BadPrompt, match="no turn of the assistant at its end"):
        mine.example(record(talk("a", "b", "c")))


def test_a_template_that_ends_no_turn_gets_an_end_of_sequence_at_the_end(model_folder: Path) -> None:
    mine = intake(model_folder, PLAIN)
    example = mine.example(record(talk("a", "b", "c", "d")))
    said = mine.tokenizer.decode([t for t, m in zip(example.target, example.mask, strict=True) if m], skip_special_tokens=False)
    assert said == "b\nd<|im_end|>" and example.target[-1] == mine.stop_tokens[0]
    nothing = mine.example(record(talk("a", "b", "c", "")))
    assert mine.tokenizer.decode(nothing.target, skip_special_tokens=False) == "b\nuser: c\nassistant: <|im_end|>"


def test_marks_may_not_be_forged() -> None:
    template = ChatTemplate(MARKED)
    with pytest.raises(BadChat, match="U\\+FDD0"):
        template.conversation(talk("x\ufdd1y\ufdd0", "z"))
    twice = ChatTemplate(MARKED.replace("{% for m", "{% generation %}!{% endgeneration %}{% for m"))
    with pytest.raises(BadChat, match="marks 2 turns as generated, the assistant has 1"):
        twice.conversation(talk("a", "b"))


def test_templates_may_break_loops_and_cannot_leave_the_sandbox() -> None:
    assert ChatTemplate("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}").prompt(talk("a", "b")) == "a"
    with pytest.raises(BadChat, match="refused"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").prompt(talk("a"))
    with pytest.raises(BadChat, match="cannot be read"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(("on_long", "less"), [("truncate_left", 22), ("truncate_right", 5), ("drop", 1), ("refuse", 1)])
def test_what_is_too_long_to_cut_is_refused(model_folder: Path, on_long: Any, less: int) -> None:
    with pytest.raises(TooLong, match=rf"22 \+ 5 tokens: at most {27 - less} fit"):
        intake(model_folder, PLAIN, on_long=on_long, max_tokens=27 - less).example(record(talk("abcd", "efgh")))


def test_the_beginning_of_a_prompt_or_the_end_of_a_target_is_cut(model_folder: Path) -> None:
    whole = intake(model_folder, PLAIN).example(record(talk("abcd", "efgh")))
    assert len(whole) == 27
    left = intake(model_folder, PLAIN, on_long="truncate_left", max_tokens=12).example(record(talk("abcd", "efgh")))
    assert left.target == whole.target and left.prompt.tokens == whole.prompt.tokens[-7:]
    right = intake(model_folder, PLAIN, on_long="truncate_right", max_tokens=25).example(record(talk("abcd", "efgh")))
    assert right.prompt == whole.prompt and right.target == whole.target[:-2]


def rows(path: Path, *values: Any) -> dict[str, Any]:
    path.write_text("".join(json.dumps({"messages": v, "n": i}) + "\n" for i, v in enumerate(values)))
    return {"name": "jsonl", "params": {"path": str(path), "messages": "messages"}}


def document(model: Path, source: dict[str, Any], **changes: Any) -> dict[str, Any]:
    changes = {"data__chat": True, **changes}
    found = recipe(model, domain="sft", data__source=source, algorithm={"name": "cross_entropy"}, **changes)
    return {k: v for k, v in found.items() if k not in ("rollout", "reward")}


@pytest.mark.parametrize(
    ("values", "changes", "words"),
    [
        ([talk("a", "b"), "text"], {}, ["line 2", "'messages'", "no conversation"]),
        ([talk("a", "b"), [{"content": "x"}]], {}, ["line 2", "message 1", "no role"]),
        ([talk("a", "b"), talk("a")], {}, ["data.source record 2", "no turn of the assistant"]),
        ([talk("a", "b"), talk("a", "b")], {"data__chat": False}, ["data.source record 1", "data.chat to true"]),
        ([talk("a", "b" * 200), talk("a", "b")], {}, ["record 1", "at most 128 fit"]),
        ([talk("a", "b")] * 2, {"data__learn": "some"}, ["data.learn", "'some'"]),
        ([talk("a", "b")] * 2, {"data__max_tokens": 1}, ["data.max_tokens", "1"]),
    ],
)
def test_bad_conversations_are_named(
    settings: Settings, model_folder: Path, tmp_path: Path, values: Any, changes: Any, words: list[str]
) -> None:
    with pytest.raises(BadInput) as caught:
        prepare(document(model_folder, rows(tmp_path / "data.jsonl", *values), **changes), settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_suites_measure_all_that_a_source_has(settings: Settings, model_folder: Path, tmp_path: Path) -> None:
    source = rows(tmp_path / "data.jsonl", *([talk("a", "b")] * 5))
    good = prepare(document(model_folder, source, eval={"held_out": {"source": source, "batch_size": 2}}), settings)
    assert good.doc.plan.suites["held_out"].size == 5
    endless: dict[str, Any] = {"x": {"source": {"name": "sorting"}}}
    for suites, words in (
        (endless, ["eval.x.size", "never ends"]),
        ({"x": {"source": source, "size": 6}}, ["eval.x.size", "6", "at most 5"]),
        ({"x.y": {"source": source}}, ["eval.x.y", "holds no '.'"]),
        ({"x": {"source": source, "reward": {}}}, ["eval.x.reward", "unknown key"]),
        ({"x": {"source": {"name": "jsonl", "params": {}}}}, ["eval.x.source.params.path"]),
    ):
        with pytest.raises(BadInput) as caught:
            prepare(document(model_folder, source, eval=suites), settings)
        assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("body", ["{{ 1 // 0 }}", "{{ range(10**30) | list }}", "{{ messages[0].content + 1 }}"])
def test_a_template_that_fails_refuses_the_record(model_folder: Path, body: str) -> None:
    with pytest.raises(BadPrompt, match="refused the messages"):
        intake(model_folder, body).example(record(talk("a", "b")))


def test_nulls_of_a_table_are_as_if_they_were_not_there(settings: Settings, model_folder: Path, tmp_path: Path) -> None:
    """Where one message has a weight, a table gives all others a null; and a date is no text."""
    import pyarrow as pa
    import pyarrow.parquet

    messages = talk("a", "bb", "c", "dd")
    messages[1] |= {"weight": 0, "at": datetime(2026, 1, 1, tzinfo=UTC)}
    pyarrow.parquet.write_table(pa.table({"messages": [messages]}), tmp_path / "data.parquet")
    params = {"path": str(tmp_path / "data.parquet"), "messages": "messages"}
    found = open_source(Component(name="parquet", params=params), settings, "data.source").get(0)
    assert "weight" not in found.prompt[0] and sum(intake(model_folder, CHATML).example(found).mask) == 3


def test_whole_conversations_are_no_prompts(settings: Settings, model_folder: Path, tmp_path: Path) -> None:
    source = rows(tmp_path / "data.jsonl", *([talk("a", "b")] * 4))
    with pytest.raises(BadInput) as caught:
        prepare(recipe(model_folder, data__source=source, data__chat=True), settings)
    assert "data.source record 1" in str(caught.value) and "which sft imitates" in str(caught.value)


def test_every_kind_of_file_holds_conversations(settings: Settings, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    wanted = [talk("a", "b"), talk("c", "d", "e", "f")]
    pyarrow.parquet.write_table(pa.table({"messages": wanted}), tmp_path / "data.parquet")
    params = {"path": str(tmp_path / "data.parquet"), "messages": "messages"}
    for source in (rows(tmp_path / "data.jsonl", *wanted), {"name": "parquet", "params": params}):
        opened = open_source(Component(**source), settings, "data.source")
        assert [opened.get(i).prompt for i in range(2)] == wanted and opened.get(0).conversation
