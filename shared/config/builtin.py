"""The components that UniMesh brings: one row each. Adding one is a parameter model, a row here, and its implementation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from shared.config import algorithms, families
from shared.config.algorithms import Params

Share = Annotated[float, pydantic.Field(ge=0, le=1)]


class ExactMatch(Params):
    field: str = "answer"
    """Metadata field that holds the answer."""
    strip: bool = False
    ignore_case: bool = False


class RegexFormat(Params):
    pattern: str
    full: bool = True
    """The whole completion must match, not a part of it."""


class Length(Params):
    target: int = pydantic.Field(..., ge=0)
    """Tokens at which the score is 1; it falls linearly to 0 over `width` on both sides."""
    width: int = pydantic.Field(..., ge=1)


class ReasoningGym(Params):
    """Reads task name and entry from the metadata that the reasoning_gym source wrote."""

    answer_pattern: str | None = None
    """Group 1 of its last match in the completion is graded; None grades the whole completion."""


class Contains(Params):
    field: str = "answer"
    """Metadata field that holds what must stand in the completion."""
    text: str | None = None
    """The same text for all rows, in place of the field."""
    ignore_case: bool = False


class MultipleChoice(Params):
    field: str = "answer"
    """Metadata field that holds the letter A-D, or 1-4."""
    mode: Literal["plain", "phrase", "tag", "graded"] = "plain"
    """How the letter may be given: anywhere; by a tag or a phrase; `<answer>` tags only; anyhow, but half without a tag."""


class MathVerify(Params):
    field: str = "answer"
    """Metadata field that holds the answer in LaTeX or plain text."""


class JsonSchema(Params):
    json_schema: dict[str, Any]
    """Of the draft that its `$schema` names, else 2020-12."""
    fenced: bool = True
    """The last fenced block counts if there is one, else the whole completion."""


class Brightness(Params):
    """0 … 1, of all pixels (of a video, of all frames)."""


class Colour(Params):
    rgb: tuple[Share, Share, Share] | None = None
    """Each 0 … 1; None: the first colour that the prompt names (red, green, blue, yellow)."""


class ShapesScorer(Params):
    """Prompts are a colour and a shape: `red disc`."""


class JpegSize(Params):
    """Compressibility as in DDPO (arXiv 2305.13301)."""

    quality: int = pydantic.Field(95, ge=1, le=100)
    reward: Literal["small", "large"] = "small"
    scale_kb: float = pydantic.Field(100.0, gt=0)
    """Kilobytes that change the score by 1."""


class Ocr(Params):
    reward: Literal["edit_similarity", "substring_match", "exact_match", "counter_iou"] = "edit_similarity"
    frames: int = pydantic.Field(4, ge=1)
    """Of a video, spread over it; the best one counts."""


class ImageText(Params):
    path: str
    """Folder of the model, below the reward service's roots (UNIMESH_ROOTS)."""
    batch_size: int = pydantic.Field(32, ge=1)
    frames: int = pydantic.Field(4, ge=1)
    """Of a video, spread over it; their mean counts."""


class Aesthetic(ImageText):
    head: str
    """The predictor's own weights."""


class ImageReward(ImageText):
    weights: str
    """ImageReward's own weights; in `path` lies BERT's tokenizer."""


class HpsV3(ImageText):
    weights: str
    """HPS v3's own weights; in `path` lie Qwen2-VL's config, tokenizer and processor."""
    instruction: str
    """File of the text that it was trained with, published with its weights, with `{prompt}` in it."""
    batch_size: int = pydantic.Field(4, ge=1)


class Asking(Params):
    """How another service is asked over HTTP."""

    key_variable: str | None = pydantic.Field(None, pattern=r"^UNIMESH_KEY_[A-Z0-9_]+$")
    """Environment variable of the reward service that holds the bearer token: the token itself never stands in a recipe, and a
    recipe can name no other variable."""
    timeout_s: float = pydantic.Field(60.0, gt=0)
    """For one request."""
    attempts: int = pydantic.Field(3, ge=1)
    """Only 408, 425, 429, 5xx, time-outs and broken connections are tried again."""
    concurrency: int = pydantic.Field(8, ge=1)
    requests_per_minute: float | None = pydantic.Field(None, gt=0)


class LlmJudge(Asking):
    base_url: str = pydantic.Field(..., pattern=r"^https?://\S+$")
    """Of an OpenAI-compatible API, such as http://127.0.0.1:8000/v1."""
    model: str
    system: str = ""
    template: str = (
        "Rate the answer to the question from 0 to 10.\n\nQuestion:\n{prompt}\n\nAnswer:\n{completion}\n\n"
        "Reply with `Score: ` and the number alone."
    )
    """`{prompt}`, `{completion}` and `{metadata}` are filled in. The picture is shown with it, and a reference before it;
    of a video some frames."""
    frames: int = pydantic.Field(4, ge=1)
    """Of a video."""
    score_pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)"
    """Group 1 of its last match is the score."""
    least: float = 0.0
    most: float = 10.0
    """The score is scaled from this range to 0 … 1; one outside of it is a failure."""
    temperature: float = 0.0
    max_tokens: int = pydantic.Field(64, ge=1)
    tokens_per_minute: float | None = pydantic.Field(None, gt=0)

    @pydantic.model_validator(mode="after")
    def _range(self) -> LlmJudge:
        if not self.least < self.most:
            raise ValueError(f"least {self.least:g} must be below most {self.most:g}")
        return self


class Geneval2(Asking):
    base_url: str = pydantic.Field(..., pattern=r"^https?://\S+$")
    """Of an OpenAI-compatible API of a vision-language model that tells log-probs."""
    model: str
    field: str = "questions"
    """Of the record: a list of [question, answer]."""
    instruction: str = "Answer in one word."
    reduce: Literal["gm", "am"] = "gm"
    """Geometric or arithmetic mean over the questions."""
    top_logprobs: int = pydantic.Field(20, ge=1, le=20)


class RemoteHttp(Asking):
    url: str = pydantic.Field(..., pattern=r"^https?://\S+$")
    scorer: str = ""
    """Name of the scorer at the other side, if it has several."""
    version: str | None = None
    """Pinned: an answer of another version is a failure."""
    rows_per_request: int = pydantic.Field(64, ge=1)


class Engine(Params):
    max_batch_rows: int = pydantic.Field(1024, ge=1)
    """Most sequences generated at once."""
    batch_wait_ms: float = pydantic.Field(0.0, ge=0)
    length_bucket: float = pydantic.Field(1.5, ge=1)
    """Prompts of one forward pass differ in length by at most this factor."""


class Diffusers(Params):
    forward_batch_size: int = pydantic.Field(16, ge=1)
    """Most pictures of one forward pass."""
    batch_wait_ms: float = pydantic.Field(0.0, ge=0)
    trajectory_dtype: Literal["float32", "float16"] = "float32"
    """Of the stored points, and of the path itself."""
    video: Literal["mp4", "raw"] = "mp4"
    """How videos travel to scorers and people: encoded, or frame by frame."""
    frame_rate: int = pydantic.Field(16, ge=1, le=240)
    """Frames a second of an encoded video."""
    crf: int = pydantic.Field(10, ge=0, le=51)
    """Of an encoded video, x264's constant rate factor: smaller is larger, and nearer to the frames."""
    cache_mb: float = pydantic.Field(2048.0, ge=0)
    """Of encoded prompts that are kept."""


class Columns(Params):
    """Which fields of a row mean what; all others become its metadata."""

    prompt: str = "prompt"
    """Field that holds the prompt: a text, or a list of messages for a chat template."""
    target: str | None = None
    """Field that holds the text to imitate (sft)."""
    picture: str | None = None
    """Field that holds the path of the picture to imitate (sft of a model that makes pictures), from the file's folder on."""
    reference: str | None = None
    """Field that holds the path of the picture that the prompt is about (image to image, image to video), as of `picture`."""
    messages: str | None = None
    """Field that holds a conversation, in place of prompt and target (sft): a list of objects with role and content. What the
    assistant says is imitated, but for its messages with `weight` 0."""
    id: str | None = None
    """Field of unique ids, checked; None: none."""
    shuffle: bool = True
    """Each epoch in an order of its own, by the recipe's seed."""

    @pydantic.model_validator(mode="after")
    def _one_kind(self) -> Columns:
        if self.messages is not None and self.target is not None:
            raise ValueError("messages and target: give one of them")
        return self


class Jsonl(Columns):
    path: str
    """One JSON object a line; `.gz` and `.zst` are read too."""


class Parquet(Columns):
    path: str


class SavedDataset(Columns):
    path: str
    """Folder that Hugging Face's `Dataset.save_to_disk` wrote, of one split."""


class Hub(Columns):
    """A data set by its name on the Hugging Face Hub."""

    name: str = pydantic.Field(..., pattern=r"^[\w.-]+/[\w.-]+$")
    """OWNER/NAME."""
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    """A commit pins the data; a stream without one may change under a job."""
    streaming: bool = False
    """Rows are read as they are drawn, in their order, and never all at once."""


class MixturePart(Params):
    name: str
    params: dict[str, Any] = pydantic.Field({})
    weight: float = pydantic.Field(1.0, gt=0)


class Mixture(Params):
    parts: dict[str, MixturePart] = pydantic.Field(..., min_length=1)
    """By a name that each record gets as `source` in its metadata."""
    seed: int = 0
    """Of the parts' epochs."""


class Sorting(Params):
    """Six digits and `>`; the answer is the digits sorted. A tenth of the prompts (CRC-32 divisible by 10) is held out."""

    digits: int = pydantic.Field(6, ge=1, le=18)
    split: Literal["train", "held_out"] = "train"
    seed: int = 0
    size: int | None = pydantic.Field(None, ge=1)
    """Distinct draws before the source repeats; None: it never does."""
    right: float = pydantic.Field(0.30, ge=0, le=1)
    """Share of right demonstrations of the careless teacher (sft)."""
    rotated: float = pydantic.Field(0.45, ge=0, le=1)
    """Share in which the smallest digit stands last; the rest copies the prompt."""


class ReasoningGymSource(Params):
    dataset: str
    """Name of a reasoning-gym data set."""
    config: dict[str, Any] = pydantic.Field({})
    size: int = pydantic.Field(1000, ge=1)
    seed: int = 0


class JsonlTracker(Params):
    """Always there: `jobs/ID/tracking/metrics.jsonl` below the state folder."""


class TensorboardTracker(Params):
    """Event files in `jobs/ID/tracking/tensorboard`."""


class WandbTracker(Params):
    project: str = "unimesh"
    entity: str | None = None
    mode: Literal["offline", "online"] = "offline"
    """Online takes its key from the controller's own environment."""


class TrackioTracker(Params):
    project: str = "unimesh"


class MlflowTracker(Params):
    experiment: str = "unimesh"
    uri: str | None = pydantic.Field(None, pattern=r"^https?://\S+$")
    """A tracking server; None: a SQLite file below the state folder."""


_MODEL = {"media": True, "device": True}

TABLE: tuple[tuple[Any, str, type[Params], str, dict[str, Any]], ...] = (
    *algorithms.TABLE,
    ("scorer", "exact_match", ExactMatch, "1 if the completion equals the answer, else 0", {"media": False}),
    ("scorer", "regex", RegexFormat, "1 if the completion matches a pattern, else 0", {"isolated": True, "media": False}),
    ("scorer", "length", Length, "1 at a target length, falling on both sides", {"media": False}),
    ("scorer", "reasoning_gym", ReasoningGym, "the data set's own grader", {"isolated": True, "media": False}),
    ("scorer", "contains", Contains, "1 if the completion contains a text, else 0", {"media": False}),
    ("scorer", "multiple_choice", MultipleChoice, "the chosen letter against the answer", {"media": False}),
    (
        "scorer",
        "math_verify",
        MathVerify,
        "1 if both sides are the same mathematics, else 0",
        {"isolated": True, "media": False},
    ),
    (
        "scorer",
        "json_schema",
        JsonSchema,
        "1 if the completion is JSON that fits a schema, else 0",
        {"isolated": True, "media": False},
    ),
    ("scorer", "llm_judge", LlmJudge, "a language model's rating, scaled to 0 … 1", {}),
    ("scorer", "remote_http", RemoteHttp, "a scorer that runs elsewhere", {}),
    ("scorer", "brightness", Brightness, "the mean brightness of a picture", {"media": True}),
    ("scorer", "colour", Colour, "how much of a picture has a colour", {"media": True}),
    ("scorer", "jpeg_size", JpegSize, "how small (or large) a picture is as a JPEG", {"media": True}),
    ("scorer", "shapes", ShapesScorer, "whether a picture shows the shape of the prompt, in its colour", {"media": True}),
    ("scorer", "ocr", Ocr, "whether a picture shows the text that its prompt quotes", {"media": True}),
    ("scorer", "geneval2", Geneval2, "questions about a picture, asked of a vision-language model", {"media": True}),
    ("scorer", "clip_score", ImageText, "how well a picture fits its prompt, by CLIP", _MODEL),
    ("scorer", "pick_score", ImageText, "how people would choose among pictures of a prompt, by PickScore", _MODEL),
    ("scorer", "hps_v2", ImageText, "how people would choose among pictures of a prompt, by HPS v2", _MODEL),
    ("scorer", "hps_v3", HpsV3, "how people would choose among pictures of a prompt, by HPS v3", _MODEL),
    ("scorer", "image_reward", ImageReward, "how people would choose among pictures of a prompt, by ImageReward", _MODEL),
    ("scorer", "aesthetic", Aesthetic, "how a picture pleases, by LAION's predictor", _MODEL),
    (
        "engine",
        "diffusers",
        Diffusers,
        "Hugging Face diffusers' flow-matching pipelines",
        {"torch": True, "media": True, "live": True},
    ),
    (
        "engine",
        "transformers",
        Engine,
        "Hugging Face transformers, batched, with a KV cache",
        {"torch": True, "interruptible": True, "live": True},
    ),
    ("source", "jsonl", Jsonl, "one JSON object a line", {"files": ("path",)}),
    ("source", "parquet", Parquet, "rows of a parquet file", {"files": ("path",)}),
    ("source", "saved_dataset", SavedDataset, "a Hugging Face data set saved to disk", {"files": ("path",)}),
    ("source", "hub", Hub, "a data set by its name on the Hugging Face Hub", {}),
    ("source", "mixture", Mixture, "several sources by weight", {}),
    ("source", "sorting", Sorting, "sort the digits", {}),
    ("tracker", "jsonl", JsonlTracker, "one JSON object a line; always on", {}),
    ("tracker", "tensorboard", TensorboardTracker, "TensorBoard's event files", {"packages": ("tensorboardX",)}),
    ("tracker", "wandb", WandbTracker, "Weights & Biases, offline by default", {"packages": ("wandb",)}),
    ("tracker", "trackio", TrackioTracker, "trackio's local dashboard", {"packages": ("trackio",)}),
    ("tracker", "mlflow", MlflowTracker, "MLflow", {"packages": ("mlflow",)}),
    ("source", "reasoning_gym", ReasoningGymSource, "procedural reasoning tasks", {}),
    *families.TABLE,
)
