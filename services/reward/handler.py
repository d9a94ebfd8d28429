"""Scores messages: opens the body, asks the scorer, answers with one head."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from services.reward.isolated import IsolatedScorer
from services.reward.scorers import isolated, load
from services.reward.verdict import verdict
from shared.config.sections import Scorer as ScorerSection
from shared.types.part import Part
from shared.types.rewards import RewardRequest, RewardResponse
from shared.types.sample import Sample
from shared.types.segments import TextSegment
from shared.wire import codec
from shared.wire.bodies import BodyStore
from shared.wire.envelope import ScoreHead, Span
from shared.wire.errors import BodyLost, WireError
from shared.wire.hops import Result, Work, ref_of

HAND_OVER_S = 0.02
"""Scores that come within so long are handed over, and committed, together."""
Batch = list[tuple[Work, "Future[Result]"]]


class ScoreHandler:
    """One scorer of one job. Works in a thread of its own, so that leases are renewed while a slow scorer thinks."""

    def __init__(self, name: str, section: ScorerSection, store: BodyStore, worker: str, most: int = 256) -> None:
        self.name, self.store, self.worker, self.most = name, store, worker, most
        self.ask, self.close_scorer = asker(section)
        self.queue: SimpleQueue[Batch | None] = SimpleQueue()
        self.progress = time.monotonic()
        self.thread = threading.Thread(target=self._run, name="scorer", daemon=True)
        self.thread.start()

    def capacity(self) -> int:
        return self.most

    def progressed(self) -> float:
        return self.progress

    def submit(self, works: Sequence[Work]) -> Sequence[Future[Result]]:
        self.progress = time.monotonic()
        batch: Batch = [(work, Future()) for work in works]
        self.queue.put(batch)
        return [future for _, future in batch]

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join(5)
        self.close_scorer()

    def _run(self) -> None:
        while (batch := self.queue.get()) is not None:
            self._load(batch)

    def _load(self, batch: Batch) -> None:
        bodies = self._bodies([work for work, _ in batch])
        held: list[tuple[Future[Result], ScoreHead | Exception]] = []
        since = time.monotonic()
        for work, future in batch:
            held.append((future, self._one(work, bodies)))
            if time.monotonic() - since > HAND_OVER_S:
                _hand_over(held)
                since = time.monotonic()
        _hand_over(held)

    def _bodies(self, works: Sequence[Work]) -> dict[str, codec.Buffer]:
        """By the messages' ids, those that do not travel inline, in one round trip."""
        asked = [work for work in works if work.inline is None and work.envelope.head.body is not None]
        try:
            found = self.store.load_many([ref_of(work) for work in asked])
        except BodyLost:
            return {}  # each is asked for by itself: it will turn out whose is gone
        return {work.envelope.id: body for work, body in zip(asked, found, strict=True)}

    def _one(self, work: Work, bodies: Mapping[str, codec.Buffer]) -> ScoreHead | Exception:
        if work.cancelled.is_set():
            return BodyLost("cancelled")
        try:
            body = work.inline or bodies.get(work.envelope.id) or self.store.load(ref_of(work))
            return self._score(codec.decode(body, list[Sample]))
        except (BodyLost, WireError, ValueError) as error:
            return error

    def _score(self, samples: list[Sample]) -> ScoreHead:
        started, clock = time.time(), time.monotonic()
        rows = [row for sample in samples for row in requests(sample)]
        response = self.ask(rows)
        self.progress = time.monotonic()
        span = Span(f"reward.{self.name}", self.worker, started, self.progress - clock)
        return ScoreHead(scores=response.scores, errors=response.errors, span=span)


def _hand_over(held: list[tuple[Future[Result], ScoreHead | Exception]]) -> None:
    """Together, so that they are committed together."""
    for future, answer in held:
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
    held.clear()


def asker(section: ScorerSection) -> tuple[Callable[[list[RewardRequest]], RewardResponse], Callable[[], None]]:
    """(ask, close) of a scorer, in a process of its own if it has to be."""
    if isolated(section.name):
        process = IsolatedScorer(section.name, section.params, section.timeout_s)
        return process.score, process.close
    scorer = load(section.name, section.params)
    return lambda rows: verdict(scorer.score, rows), lambda: None


def requests(sample: Sample) -> list[RewardRequest]:
    """What the scorer sees of each row of the last generated Part: its own text, the prompt's text and metadata."""
    frontier = sample.frontier
    index = next(k for k, part in enumerate(sample.parts) if part is frontier)
    lineage = Sample(sample.parts[: index + 1])
    texts, status = _texts(frontier), frontier.status or ("ok",) * len(frontier)
    lengths = frontier.segment.lengths if isinstance(frontier.segment, TextSegment) else [0] * len(frontier)
    prompt = sample.parts[0]
    at = {root: row for row, root in enumerate(prompt.sample_ids)}
    out = []
    for row, sample_id in enumerate(frontier.sample_ids):
        top = at[sample_id.partition("/")[0]]
        shown = _texts(prompt)[top] if len(lineage.parts) == 2 else _dialogue(lineage, row)
        out.append(
            RewardRequest(
                sample_id=sample_id,
                prompt=shown,
                completion=texts[row],
                truncated=status[row] == "truncated",
                tokens=int(lengths[row]),
                metadata=prompt.metadata[top] if prompt.metadata else {},
                media=frontier.media[row],
                reference=prompt.references[top],
            )
        )
    return out


def _texts(part: Part) -> tuple[str, ...]:
    return part.text if "text" in part.primitives else ("",) * len(part)


def _dialogue(lineage: Sample, row: int) -> str:
    """Everything before the frontier in the row's lineage, turn after turn."""
    turns = lineage.turns(row)[:-1]
    return "\n".join(_texts(lineage.parts[t.part])[t.row] for t in turns)
