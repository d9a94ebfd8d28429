"""Scores messages: opens the body, asks the scorer, answers with one head."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
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
from shared.wire.envelope import BodyRef, ScoreHead
from shared.wire.errors import BodyLost, WireError
from shared.wire.hops import Result, Work

TOGETHER = 8
"""Messages whose scores are handed over at once."""
Batch = list[tuple[Work, "Future[Result]"]]


class ScoreHandler:
    """One scorer of one job. Works in a thread of its own, so that leases are renewed while a slow scorer thinks."""

    def __init__(self, section: ScorerSection, store: BodyStore, worker: str, most: int = 256) -> None:
        self.store, self.worker, self.most = store, worker, most
        self.ask, self.close_scorer = _asker(section)
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
        refs = [work.envelope.head.body for work, _ in batch]
        try:
            bodies = self.store.load_many([ref for ref in refs if ref is not None])
        except BodyLost:
            bodies = None  # find out whose it is, one by one
        for low in range(0, len(batch), TOGETHER):
            rows = range(low, min(low + TOGETHER, len(batch)))
            found = [self._one(batch[i][0], None if bodies is None else bodies[i]) for i in rows]
            for i, answer in zip(rows, found, strict=True):  # together, so that they are committed together
                if isinstance(answer, Exception):
                    batch[i][1].set_exception(answer)
                else:
                    batch[i][1].set_result(answer)

    def _one(self, work: Work, body: codec.Buffer | None) -> ScoreHead | Exception:
        if work.cancelled.is_set():
            return BodyLost("cancelled")
        try:
            return self._score(codec.decode(self.store.load(_ref(work)) if body is None else body, list[Sample]))
        except (BodyLost, WireError, ValueError) as error:
            return error

    def _score(self, samples: list[Sample]) -> ScoreHead:
        started = time.monotonic()
        rows = [row for sample in samples for row in requests(sample)]
        response = self.ask(rows)
        self.progress = time.monotonic()
        return ScoreHead(scores=response.scores, errors=response.errors, worker=self.worker, seconds=self.progress - started)


def _ref(work: Work) -> BodyRef:
    if work.envelope.head.body is None:
        raise BodyLost("the message names no body")
    return work.envelope.head.body


def _asker(section: ScorerSection) -> tuple[Callable[[list[RewardRequest]], RewardResponse], Callable[[], None]]:
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
            )
        )
    return out


def _texts(part: Part) -> tuple[str, ...]:
    return part.text if "text" in part.primitives else ("",) * len(part)


def _dialogue(lineage: Sample, row: int) -> str:
    """Everything before the frontier in the row's lineage, turn after turn."""
    turns = lineage.turns(row)[:-1]
    return "\n".join(_texts(lineage.parts[t.part])[t.row] for t in turns)
