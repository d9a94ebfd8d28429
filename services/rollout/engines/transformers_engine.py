"""The `transformers` engine: slices are generated in batches of like length."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.rollout.engines.base import Slice
from services.rollout.engines.batching import BatchingEngine, Held, Item, rows
from shared.config.builtin import Engine as EngineParams
from shared.models.ar.bundle import Bundle, assign
from shared.models.ar.generate import Completion, generate
from shared.models.ar.philox import sample_seed
from shared.models.tensors import decode
from shared.types.params import ARSamplingParams
from shared.types.part import Text
from shared.types.sample import Sample
from shared.types.segments import TextSegment
from shared.wire.codec import Buffer

State = dict[str, Tensor]
PROBE_TOKENS = 12


class TransformersEngine(BatchingEngine):
    def __init__(self, bundle: Bundle, params: EngineParams) -> None:
        self.bundle, self.params = bundle, params
        self.version = -1
        super().__init__(params.max_batch_rows, params.batch_wait_ms)

    def load(self, files: Sequence[tuple[str, Buffer]]) -> State:
        found = [decode(data) for name, data in files if name.endswith(".safetensors")]
        return {name: value for tensors in found for name, value in tensors.items()}

    def adopt(self, track: str, version: int, loaded: State) -> None:
        self.wait_until_idle()
        assign(self.bundle.model, loaded)
        self.version = version

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
        samples = [sample for item in batch for sample in item.samples]
        owner = [place for place, item in enumerate(batch) for s in item.samples for _ in s.frontier.sample_ids]
        first = [owner.index(place) for place in range(len(batch))]
        missing = [rows(item.samples) for item in batch]
        completions: dict[int, Completion] = {}

        def ended(row: int, completion: Completion) -> None:
            completions[row] = completion
            place = owner[row]
            missing[place] -= 1
            if not missing[place]:
                own = iter(range(first[place], len(owner)))
                held.ended(
                    place,
                    [self._fill(s, [completions[next(own)] for _ in s.frontier.sample_ids]) for s in batch[place].samples],
                )

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

        generate(self.bundle, tokens, places, seeds, params, tick, ended)

    def _fill(self, sample: Sample, completions: list[Completion]) -> Sample:
        texts = self.bundle.tokenizer.decode_batch([c.tokens for c in completions], skip_special_tokens=True)
        segment = TextSegment(
            tokens=np.asarray([t for c in completions for t in c.tokens], np.int32),
            lengths=np.asarray([len(c.tokens) for c in completions], np.int32),
            log_probs=np.asarray([p for c in completions for p in c.log_probs], np.float32),
            finish_reasons=tuple(c.finish for c in completions),
        )
        return sample.fill(
            segment,
            primitives={"text": tuple(map(Text, texts))},
            status=tuple("ok" if c.finish == "stop" else "truncated" for c in completions),
            output_version=np.full(len(completions), self.version, np.int64),
        )


def _length(samples: Slice) -> int:
    """Longest prompt, by its Parts' tokens."""
    return max(int(s.parts[0].text_segment.lengths.max()) for s in samples)


def _batch_key(samples: Slice) -> object:
    return samples[0].frontier.sampling_params
