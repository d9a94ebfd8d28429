"""`POST /score`: the scorers of training for outside callers, many rows at a time, with a deadline."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any

import numpy as np
import pydantic
import uvicorn
from fastapi import Body, FastAPI
from pydantic import Field

from services.reward.handler import asker
from services.reward.verdict import failed
from shared.config import specs, tokens
from shared.config.problems import bad
from shared.config.sections import Reward, Scorer
from shared.config.settings import Settings
from shared.http import problem
from shared.http.guard import Guard
from shared.media import from_file
from shared.types.part import Media
from shared.types.rewards import Blend, RewardRequest, RewardResponse, blend

log = logging.getLogger(__name__)

MOST_ROWS = 10_000
KEPT = 32
"""Scorers that stay loaded between calls."""
EXAMPLE: Any = {
    "reward": {"scorers": {"answer": {"name": "exact_match", "params": {"strip": True}}}},
    "rows": [{"prompt": "3 1 2>", "completion": "123", "metadata": {"answer": "123"}}],
    "deadline_s": 10,
}


class File(pydantic.BaseModel):
    """A picture (PNG, JPEG, WebP …) or video (MP4)."""

    model_config = pydantic.ConfigDict(extra="forbid")

    mime: str
    base64: pydantic.Base64Bytes


class Row(pydantic.BaseModel):
    """One completion: a text, or what was made in its place."""

    model_config = pydantic.ConfigDict(extra="forbid")

    id: str = ""
    prompt: str = ""
    completion: str = ""
    media: File | None = None
    truncated: bool = False
    tokens: int = 0
    metadata: dict[str, Any] = {}

    @pydantic.model_validator(mode="after")
    def _something(self) -> Row:
        if self.media is None and "completion" not in self.model_fields_set:
            raise ValueError("completion: give it, or media")
        return self


class Request(pydantic.BaseModel):
    """A recipe's reward section (at most 32 scorers), and the rows to score."""

    model_config = pydantic.ConfigDict(extra="forbid", json_schema_extra={"examples": [EXAMPLE]})

    reward: Reward
    rows: list[Row] = Field(..., min_length=1, max_length=MOST_ROWS)
    deadline_s: float = Field(30.0, gt=0, le=3600)
    """A scorer that has not answered by then has failed for all rows."""


class Scored(pydantic.BaseModel):
    """null is a failure, and never a 0; `errors` says why, by scorer."""

    id: str
    reward: float | None
    components: dict[str, float | None]
    errors: dict[str, str] = {}


class Answer(pydantic.BaseModel):
    rows: list[Scored]
    seconds: float


class Loaded:
    """A scorer that is kept: one call at a time, all from one thread (with which a process of its own would end)."""

    def __init__(self, section: Scorer) -> None:
        self.ask, self.close_scorer = asker(section)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix=f"score {section.name}")
        self.users = 0

    def submit(self, rows: list[RewardRequest]) -> Future[RewardResponse]:
        return self.pool.submit(self.ask, rows)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.close_scorer()


class Scorers:
    """Loads scorers as they are asked for, and forgets those that were not asked for longest."""

    def __init__(self, kept: int = KEPT) -> None:
        """`kept`: how many stay loaded while nobody asks for them."""
        self.kept, self.lock = kept, threading.Lock()
        self.loaded: OrderedDict[str, Loaded] = OrderedDict()

    @contextmanager
    def using(self, sections: Mapping[str, Scorer]) -> Iterator[dict[str, Loaded]]:
        """The scorers by name; none is forgotten meanwhile. BadInput, LookupError or ImportError if one cannot be made."""
        with self.lock:
            held = {name: self._get(section) for name, section in sections.items()}
            for scorer in held.values():
                scorer.users += 1
        try:
            yield held
        finally:
            with self.lock:
                for scorer in held.values():
                    scorer.users -= 1
                idle = [key for key, scorer in self.loaded.items() if not scorer.users]
                for key in idle[: max(0, len(self.loaded) - self.kept)]:
                    self.loaded.pop(key).close()

    def _get(self, section: Scorer) -> Loaded:
        key = json.dumps([section.name, section.params, section.timeout_s], sort_keys=True)
        found = self.loaded.pop(key, None) or Loaded(section)
        self.loaded[key] = found
        return found

    def close(self) -> None:
        with self.lock:
            for scorer in self.loaded.values():
                scorer.close()
            self.loaded.clear()


def score(scorers: Scorers, request: Request, settings: Settings) -> Answer:
    """Every scorer at once, each on all rows."""
    started = time.monotonic()
    until = started + request.deadline_s
    for name, section in request.reward.scorers.items():
        specs.check("scorer", section.name, section.params, f"reward.scorers.{name}")
        settings.check_urls(section.params, f"reward.scorers.{name}.params")
    if len(request.reward.scorers) > KEPT:
        raise bad("reward.scorers", len(request.reward.scorers), "too many at once", f"at most {KEPT}")
    rows = [
        RewardRequest(sample_id=row.id, media=_media(n, row.media), **row.model_dump(exclude={"id", "media"}))
        for n, row in enumerate(request.rows)
    ]
    try:
        with scorers.using(request.reward.scorers) as loaded:
            running = {name: scorer.submit(rows) for name, scorer in loaded.items()}
            said = {name: _answer(future, len(rows), until, request.deadline_s) for name, future in running.items()}
    except (ImportError, LookupError) as error:
        raise bad("reward.scorers", None, f"a scorer cannot be made here: {error}") from error
    components = {name: np.asarray(response.scores, np.float32) for name, response in said.items()}
    weights = {name: section.weight for name, section in request.reward.scorers.items()}
    how = Blend(method=request.reward.aggregation, weights=weights, normalize=request.reward.normalize_weights)
    rewards = blend(components, how).tolist()
    found = [_row(index, row.id, rewards[index], said) for index, row in enumerate(request.rows)]
    return Answer(rows=found, seconds=round(time.monotonic() - started, 4))


def _media(number: int, file: File | None) -> Media | None:
    if file is None:
        return None
    try:
        return from_file(file.mime, file.base64)
    except ValueError as error:
        raise bad(f"rows.{number}.media", file.mime, str(error), "a picture (image/png …) or video/mp4 in base64") from error


def _answer(future: Future[RewardResponse], rows: int, until: float, deadline_s: float) -> RewardResponse:
    try:
        return future.result(max(0.0, until - time.monotonic()))
    except TimeoutError:
        future.cancel()
        return failed(rows, f"not scored within the deadline of {deadline_s:g} s")
    except Exception as error:  # a scorer is foreign code
        return failed(rows, f"{type(error).__name__}: {error}")


def _row(index: int, name: str, reward: float, said: Mapping[str, RewardResponse]) -> Scored:
    return Scored(
        id=name,
        reward=_finite(reward),
        components={scorer: _finite(response.scores[index]) for scorer, response in said.items()},
        errors={scorer: response.errors[index] for scorer, response in said.items() if index in response.errors},
    )


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def make_app(settings: Settings) -> FastAPI:
    scorers = Scorers()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        scorers.close()

    app = FastAPI(title="UniMesh scorers", version="1", lifespan=lifespan)
    problem.install(app)
    known = tokens.known(settings)
    app.add_middleware(Guard, known=known, most_bytes=settings.most_request_bytes)

    @app.post("/score", responses=problem.documented())
    def score_rows(request: Annotated[Request, Body()]) -> Answer:
        """Scores rows as training would. A failure is null with its reason, never a 0."""
        return score(scorers, request, settings)

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    return app


def serve(settings: Settings) -> Callable[[], None]:
    """Listens in a thread of its own; returns what ends it."""
    assert settings.score is not None
    host, _, port = settings.score.rpartition(":")
    config = uvicorn.Config(make_app(settings), host=host, port=int(port), log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="score", daemon=True)
    thread.start()
    log.info("POST /score listens on %s", settings.score)

    def stop() -> None:
        server.should_exit = True
        thread.join(5)

    return stop
