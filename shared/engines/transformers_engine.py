"""The `transformers` engine: slices are generated in batches of like length."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.config.builtin import Engine as EngineParams
from shared.engines.base import Slice
from shared.engines.batching import BatchingEngine, Held, Item, rows
from shared.models.ar.bundle import Bundle, assign
from shared.models.ar.generate import PAUSED, Completion, generate
from shared.models.ar.philox import sample_seed
from shared.models.tensors import decode
from shared.types.params import ARSamplingParams
from shared.types.part import PARTIAL, Text
from shared.types.sample import Sample
from shared.types.segments import TextSegment
from shared.wire.codec import Buffer

State = dict[str, Tensor]
PROBE_TOKENS = 12
STATUS = {"stop": "ok", "length": "truncated", PAUSED: PARTIAL}


class TransformersEngine(BatchingEngine):
    def __init__(self, bundle: Bundle, params: EngineParams, keep: bool = False, threaded: bool = True) -> None:
        """`keep`: a new version is adopted between two tokens of what is being generated, which goes on with it."""
        self.bundle, self.params, self.keep = bundle, params, keep
        self.version = -1
        self.pending: tuple[int, State] | None = None
        """A version that the engine's thread is to adopt."""
        self.error: Exception | None = None
        """What went wrong with it: the weights are a mixture until another version is adopted."""
        super().__init__(params.max_batch_rows, params.batch_wait_ms, threaded)

    def load(self, files: Sequence[tuple[str, Buffer]]) -> State:
        found = [decode(data) for name, data in files if name.endswith(".safetensors")]
        return {name: value for tensors in found for name, value in tensors.items()}

    def adopt(self, track: str, version: int, loaded: State) -> None:
        with self.quiet:
            if self.keep and self.running and not self.pinned and version > self.version:  # no row goes back
                self.pending = (version, loaded)
                self.quiet.wait_for(lambda: self.pending is None or not self.running)
            else:
                self.quiet.wait_for(lambda: not self.running)
                self.pending = (version, loaded)
            self._change()
            if self.error is not None:
                raise self.error

    def suspend(self) -> None:
        self.suspending = self.keep

    def _change(self) -> None:
        """Adopts the version that waits, if one does. Under the lock of `quiet`."""
        if self.pending is None:
            return
        version, loaded = self.pending
        self.error = None
        try:
            assign(self.bundle.model, loaded)
            self.version = version
        except Exception as error:  # the thread that asked for it raises it
            self.error = error
        self.pending = None
        self.quiet.notify_all()

    @torch.no_grad()
    def probe(self) -> float | None:
        if self.running:
            return None
        size = self.bundle.model.get_input_embeddings().num_embeddings
        tokens = torch.arange(PROBE_TOKENS, device=self.bundle.model.device) * 7919 % size
        log_probs = self.bundle.model(tokens[None]).logits[0].double().log_softmax(-1)
        return float(log_probs[:-1].gather(1, tokens[1:, None]).sum())

    # the engine's thread --------------------------------------------------------------------------------------------------

    def choose(self) -> list[Item]:
        """The oldest slice and those that may share its batch: equal parameters, like lengths, within the row limit."""
        head = self.waiting[0]
        if head.alone:
            return [self.waiting.pop(0)]
        key, length = _batch_key(head.samples), _length(head.samples)
        chosen: list[Item] = []
        count = 0
        for item in self.waiting:
            alike = not item.alone and _batch_key(item.samples) == key
            own, size = _length(item.samples), rows(item.samples)
            near = max(length, own) <= self.params.length_bucket * min(length, own) + 8
            if alike and near and (not chosen or count + size <= self.max_rows):
                chosen.append(item)
                count += size
        return self.taken(chosen)

    def generate(self, batch: list[Item], held: Held) -> None:
        """Slices go out soon after their rows have ended: their rewards are computed while others are still generated."""
        if self.error is not None:
            raise self.error
        samples = [sample for item in batch for sample in item.samples]
        owner = [place for place, item in enumerate(batch) for s in item.samples for _ in s.frontier.sample_ids]
        first = [owner.index(place) for place in range(len(batch))]
        missing = [rows(item.samples) for item in batch]
        made = [completion for sample in samples for completion in _begun(sample)]

        def filled(place: int) -> Slice:
            own = iter(made[first[place] :])
            return [self._fill(s, [next(own) for _ in s.frontier.sample_ids]) for s in batch[place].samples]

        def ended(row: int, completion: Completion) -> None:
            place = owner[row]
            missing[place] -= 1
            if not missing[place]:
                held.ended(place, filled(place))

        params = samples[0].frontier.sampling_params
        if not isinstance(params, ARSamplingParams):
            raise ValueError(f"the transformers engine cannot do {type(params).__name__}")
        prompts: dict[bytes, int] = {}
        tokens: list[np.ndarray[Any, Any]] = []
        places: list[int] = []
        seeds: list[int] = []
        for sample in samples:
            for row, sample_id in enumerate(sample.frontier.sample_ids):
                prompt = sample.conditioning(row)
                place = prompts.setdefault(prompt.tobytes(), len(prompts))
                if place == len(tokens):
                    tokens.append(prompt)
                places.append(place)
                seeds.append(sample_seed(params.seed, sample_id))

        def tick() -> None:
            self.progress = time.monotonic()
            held.maybe(self.progress)

        def pause() -> bool:
            return self.suspending or self.pending is not None

        todo = list(range(len(made)))
        for row, completion in enumerate(made):
            if completion.finish in ("stop", "length") and completion.tokens:
                todo.remove(row)
                ended(row, completion)
        while todo:
            for row in todo:
                _span(made[row], self.version)
            some = [made[row] for row in todo]
            prompts_of, seeds_of = [places[row] for row in todo], [seeds[row] for row in todo]
            tell = lambda place, completion, rows=tuple(todo): ended(rows[place], completion)  # noqa: E731
            generate(self.bundle, tokens, prompts_of, seeds_of, params, tick, tell, some, pause)
            todo = [row for row in todo if made[row].finish == PAUSED]
            if self.suspending:
                held.rest(filled)
                return
            with self.quiet:
                self._change()
                if self.error is not None:
                    raise self.error

    def _fill(self, sample: Sample, completions: list[Completion]) -> Sample:
        texts = self.bundle.tokenizer.decode_batch([c.tokens for c in completions], skip_special_tokens=True)
        segment = TextSegment(
            tokens=np.asarray([t for c in completions for t in c.tokens], np.int32),
            lengths=np.asarray([len(c.tokens) for c in completions], np.int32),
            log_probs=np.asarray([p for c in completions for p in c.log_probs], np.float32),
            finish_reasons=tuple(c.finish for c in completions),
            version_spans=tuple(tuple(c.spans) for c in completions) if any(len(c.spans) > 1 for c in completions) else None,
        )
        return sample.fill(
            segment,
            primitives={"text": tuple(map(Text, texts))},
            status=tuple(STATUS[c.finish] for c in completions),
            output_version=np.asarray([min(version for _, version in c.spans) for c in completions], np.int64),
        )


def _begun(sample: Sample) -> list[Completion]:
    """What there is of each row: nothing yet, or what another turn made."""
    part = sample.frontier
    if part.segment is None:
        return [Completion() for _ in part.sample_ids]
    segment, found = part.text_segment, []
    assert segment.log_probs is not None and segment.finish_reasons is not None and part.output_version is not None
    for row, (low, high) in enumerate(itertools.pairwise(segment.offsets().tolist())):
        versions = ((0, int(part.output_version[row])),) if segment.version_spans is None else segment.version_spans[row]
        tokens, log_probs = segment.tokens[low:high].tolist(), segment.log_probs[low:high].tolist()
        found.append(Completion(tokens, log_probs, segment.finish_reasons[row], list(versions)))
    return found


def _span(completion: Completion, version: int) -> None:
    """From here on its tokens are of this version."""
    if completion.spans and completion.spans[-1][0] == len(completion.tokens):
        completion.spans.pop()  # it made none
    if not completion.spans or completion.spans[-1][1] != version:
        completion.spans.append((len(completion.tokens), version))


def _length(samples: Slice) -> int:
    """Longest prompt, by its Parts' tokens, and what there is of its completions."""
    return max(int(s.parts[0].text_segment.lengths.max()) + _drawn(s) for s in samples)


def _drawn(sample: Sample) -> int:
    segment = sample.frontier.segment
    return int(segment.lengths.max()) if isinstance(segment, TextSegment) and len(segment) else 0


def _batch_key(samples: Slice) -> object:
    return samples[0].frontier.sampling_params
