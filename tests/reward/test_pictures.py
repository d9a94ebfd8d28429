"""Scorers of pictures: golden rules, a real recognizer, real architectures with random weights, a judge that looks."""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file

from services.reward import scorers
from services.reward.isolated import IsolatedScorer
from services.reward.scorers import geneval2, ocr
from shared.config.problems import BadInput
from shared.types import RewardRequest
from shared.types.part import Media
from tests.reward.test_asking import Other, said
from tests.vectors import Case, cases

TOPIC = "09_rewards"


@pytest.fixture
def other() -> Iterator[Other]:
    found = Other()
    yield found
    found.server.shutdown()


def load(name: str, params: dict[str, Any]) -> Any:
    return scorers.load(name, params)


def shown(pixels: Any, prompt: str = "", **metadata: Any) -> RewardRequest:
    data = np.asarray(pixels, np.uint8)
    kind = "video/raw" if data.ndim == 4 else "image/raw"
    return RewardRequest(
        sample_id="r/0", prompt=prompt, completion="", media=Media(mime=kind, data=data), metadata=dict(metadata)
    )


def written(text: str, size: tuple[int, int] = (256, 80)) -> Any:
    picture = Image.new("RGB", size, "white")
    ImageDraw.Draw(picture).text((16, 16), text, fill=(200, 20, 20), font=ImageFont.load_default(size=36))
    return np.asarray(picture)


@pytest.mark.parametrize("case", cases(TOPIC, "ocr_text_score"))
def test_texts_are_compared(case: Case) -> None:
    recognized, target = (ocr.normalized(case.params[name]) for name in ("recognized", "target"))
    if case.raises:
        with pytest.raises(ValueError, match="is empty"):
            ocr.compared(recognized, target)
        return
    expect = dict(case.expect)
    assert (recognized, target) == (expect.pop("normalized_recognized"), expect.pop("normalized_target"))
    assert ocr.compared(recognized, target) == pytest.approx(expect)


@pytest.mark.parametrize("case", cases(TOPIC, "ocr_target"))
def test_the_text_that_a_prompt_quotes(case: Case) -> None:
    if case.raises:
        with pytest.raises(ValueError, match="between double quotes"):
            ocr.target_of(case.params["prompt"])
        return
    assert ocr.target_of(case.params["prompt"]) == case.expect["target"]


@pytest.mark.parametrize("case", cases(TOPIC, "ocr_join"))
def test_pieces_are_joined(case: Case) -> None:
    assert ocr.joined(case.params["result"]) == case.expect["text"]


@pytest.mark.parametrize("case", cases(TOPIC, "geneval2_mean"))
def test_means_of_questions(case: Case) -> None:
    assert geneval2.means(case.params["scores"]) == pytest.approx(case.expect, rel=1e-9, abs=0)


@pytest.mark.parametrize("case", cases(TOPIC, "geneval2_surface_forms"))
def test_forms_of_an_answer(case: Case) -> None:
    if case.raises:
        with pytest.raises(ValueError, match="must be Yes"):
            geneval2.surface_forms(case.params["question"], case.params["answer"])
        return
    assert geneval2.surface_forms(case.params["question"], case.params["answer"]) == case.expect["forms"]


def test_a_picture_is_read() -> None:
    """By the recognizer that comes along, without a network: the right text, a near one, another one, none."""
    scorer = load("ocr", {})
    prompt = 'a sign that says "Grand Opening"'
    right, near, none = scorer.score(
        [shown(written(text, (400, 80)), prompt) for text in ("Grand Opening", "Grand Opera", "Hello World")]
    )
    assert right == 1.0 and 0.5 < near < 1 and none < 0.5
    assert scorer.score([shown(np.zeros((64, 64, 3)), prompt)]) == [0.0]
    video = np.stack([np.full((80, 400, 3), 255, np.uint8), written("Grand Opening", (400, 80))])
    assert scorer.score([shown(video, prompt)]) == [1.0], "the best frame counts"
    with pytest.raises(ValueError, match="names no text"):
        scorer.score([shown(video, "a sign")])


def test_how_much_of_a_picture_has_a_colour() -> None:
    half = np.zeros((8, 8, 3))
    half[:4] = [230, 38, 38]
    scorer = load("colour", {})
    assert scorer.score([shown(half, "a Red disc"), shown(half, "blue")]) == pytest.approx([0.5, 0.0], abs=0.01)
    assert load("colour", {"rgb": [0, 0, 0]}).score([shown(np.stack([half, half * 0]), "any")]) == pytest.approx([0.75])
    with pytest.raises(ValueError, match="names none of red, green"):
        scorer.score([shown(half, "a cat")])
    with pytest.raises(BadInput, match="rgb"):
        load("colour", {"rgb": [0, 2, 0]})


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CLIP's architecture, tiny, with random weights, its processor and a tokenizer of bytes."""
    from transformers import ByT5Tokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(0)
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**small, "vocab_size": 384, "max_position_embeddings": 24, "eos_token_id": 1},
        vision_config={**small, "image_size": 32, "patch_size": 8},
        projection_dim=12,
    )
    folder = tmp_path_factory.mktemp("clip") / "model"
    CLIPModel(config).save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@pytest.fixture
def rooted(clip: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNIMESH_ROOTS", str(clip.parent))
    return clip


def test_pictures_and_texts_by_clip(rooted: Path) -> None:
    """The scores are transformers' own cosines, whatever stands beside a row; each scorer has its own scale."""
    from transformers import AutoProcessor, CLIPModel

    rng = np.random.default_rng(0)
    rows = [shown(rng.integers(0, 255, (40, 32, 3)), prompt) for prompt in ("a cat", "a red disc", "x" * 90)]
    model: Any = CLIPModel.from_pretrained(rooted).eval()
    processor = AutoProcessor.from_pretrained(rooted)
    wanted: list[float] = []
    for row in rows:
        assert row.media is not None
        picture = Image.fromarray(np.asarray(row.media.data))
        given = processor(
            text=[row.prompt], images=[picture], return_tensors="pt", padding=True, truncation=True, max_length=24
        )
        with torch.no_grad():
            found = model(**given)
        wanted.append(float((found.image_embeds @ found.text_embeds.T)[0, 0]))
    params = {"path": str(rooted), "batch_size": 2}
    np.testing.assert_allclose(load("hps_v2", params).score(rows), wanted, atol=1e-5)
    np.testing.assert_allclose(load("clip_score", params).score(rows), np.maximum(wanted, 0), atol=1e-5)
    scale = float(model.logit_scale.detach().exp()) / 26
    np.testing.assert_allclose(load("pick_score", params).score(rows), np.multiply(wanted, scale), atol=1e-5)
    pixels = np.asarray(rows[0].media.data)  # type: ignore[union-attr]
    still = shown(np.stack([pixels] * 3), rows[0].prompt)
    np.testing.assert_allclose(load("hps_v2", params).score([still]), wanted[:1], atol=1e-5)


def test_pictures_are_rated_by_their_embedding(rooted: Path) -> None:
    head = rooted.parent / "head.safetensors"
    widths, tensors = [12, 1024, 128, 64, 16, 1], dict[str, torch.Tensor]()
    torch.manual_seed(1)
    for number, (into, out) in zip((0, 2, 4, 6, 7), itertools.pairwise(widths), strict=True):
        layer = torch.nn.Linear(into, out)
        tensors |= {f"layers.{number}.weight": layer.weight.detach(), f"layers.{number}.bias": layer.bias.detach()}
    save_file(tensors, head)
    rows = [shown(np.full((32, 32, 3), value)) for value in (10, 200)]
    scores = load("aesthetic", {"path": str(rooted), "head": str(head)}).score(rows)
    assert len(set(scores)) == 2 and all(math.isfinite(score) for score in scores)
    save_file({"layers.0.weight": torch.zeros(3, 3)}, head)
    pickled = rooted.parent / "head.pth"
    torch.save(tensors, pickled)
    for wrong in (head, pickled):
        with pytest.raises(BadInput, match=r"head.*improved-aesthetic-predictor.*convert it once"):
            load("aesthetic", {"path": str(rooted), "head": str(wrong)})


def test_weights_that_are_not_there_are_named_with_what_to_download(rooted: Path, tmp_path: Path) -> None:
    empty = rooted.parent / "empty"
    empty.mkdir(exist_ok=True)
    for name, words in (("clip_score", "openai/clip"), ("pick_score", "PickScore_v1"), ("hps_v2", "HPSv2")):
        with pytest.raises(BadInput, match=rf"path.*{words}"):
            load(name, {"path": str(empty)})
    with pytest.raises(BadInput, match="below a configured root"):
        load("clip_score", {"path": str(tmp_path)})


def test_a_judge_sees_the_picture(other: Other) -> None:
    other.answers = [(200, {}, said("Score: 5"))]
    pixels = np.full((8, 8, 3), 77, np.uint8)
    scorer = load("llm_judge", {"base_url": f"{other.url}/v1", "model": "m", "template": "How fits {prompt}?", "frames": 2})
    assert scorer.score([shown(pixels, "a cat"), shown(np.stack([pixels] * 5), "a cat")]) == [0.5, 0.5]
    contents = sorted((body["messages"][0]["content"] for _, body in other.seen), key=len)
    assert [len(content) for content in contents] == [2, 3] and contents[0][-1] == {"type": "text", "text": "How fits a cat?"}
    url = contents[0][0]["image_url"]["url"]
    assert url.startswith("data:image/png;base64,")
    sent = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
    assert np.array_equal(sent, pixels)


def test_a_judge_sees_what_a_prompt_is_about_first(other: Other, tmp_path: Path) -> None:
    other.answers = [(200, {}, said("Score: 5"))]
    Image.new("RGB", (4, 6), "red").save(tmp_path / "before.png")
    row = msgspec.structs.replace(shown(np.zeros((8, 8, 3)), "make it black"), reference=str(tmp_path / "before.png"))
    assert load("llm_judge", {"base_url": f"{other.url}/v1", "model": "m"}).score([row]) == [0.5]
    sizes = [opened(part).size for part in other.seen[0][1]["messages"][0]["content"][:-1]]
    assert sizes == [(4, 6), (8, 8)]
    gone = msgspec.structs.replace(row, reference=str(tmp_path / "gone.png"))
    assert load("llm_judge", {"base_url": f"{other.url}/v1", "model": "m"}).score([gone]) == [None]


def opened(part: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))


def test_pictures_go_to_scorers_elsewhere(other: Other, tmp_path: Path) -> None:
    """Over HTTP as files; into a process of its own as they are."""
    other.answers = [(200, {}, lambda body: {"scores": [1.0] * len(body["rows"])})]
    Image.new("RGB", (4, 6), "red").save(tmp_path / "before.png")
    pixels = np.full((8, 10, 3), 77, np.uint8)
    rows = [shown(pixels, "a"), msgspec.structs.replace(shown(pixels, "b"), reference=str(tmp_path / "before.png"))]
    assert load("remote_http", {"url": other.url}).score(rows) == [1.0, 1.0]
    first, second = other.seen[0][1]["rows"]
    assert "reference" not in first and first["media"]["mime"] == "image/png"
    sent = np.asarray(Image.open(io.BytesIO(base64.b64decode(second["media"]["base64"]))))
    assert np.array_equal(sent, pixels)
    assert Image.open(io.BytesIO(base64.b64decode(second["reference"]["base64"]))).size == (4, 6)
    scorer = IsolatedScorer("brightness", {}, timeout_s=30)
    assert scorer.score(rows).scores == pytest.approx([77 / 255] * 2)
    scorer.close()


def test_questions_about_a_picture(other: Other) -> None:
    """The probability of the right answer's first token, over its spellings; the geometric mean over questions."""

    def answer(body: Any) -> Any:
        question = body["messages"][0]["content"][1]["text"]
        tops = {"How many": {"2": 0.5, " two": 0.25, "3": 0.2}, "Is there": {"Yes": 0.6, "no": 0.4}}[question[:8]]
        listed = [{"token": token, "logprob": math.log(p)} for token, p in tops.items()]
        return {"choices": [{"logprobs": {"content": [{"top_logprobs": listed}]}}]}

    other.answers = [(200, {}, answer)]
    asked = [["How many cats?", "two"], ["Is there a dog?", "Yes"]]
    row = shown(np.zeros((8, 8, 3)), "two cats and a dog", questions=asked)
    params = {"base_url": f"{other.url}/v1", "model": "m"}
    assert load("geneval2", params).score([row]) == [pytest.approx(math.sqrt(0.75 * 0.6))]
    assert load("geneval2", params | {"reduce": "am"}).score([row]) == [pytest.approx((0.75 + 0.6) / 2)]
