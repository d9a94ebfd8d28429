"""The `diffusers` engine: prompts become latent trajectories and pixels, in batches of requests that are alike."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from shared.config.builtin import Diffusers as Params
from shared.engines.batching import BatchingEngine, Held, Item, rows
from shared.media import encoded_video
from shared.models.ar.bundle import assign
from shared.models.diffusion.family import NEGATIVE, Conditions, Family, opened
from shared.models.tensors import decode
from shared.sde import loop
from shared.sde.seeds import noise_groups, prompt_group
from shared.sde.solvers import Dpm2, Solver, UniPC
from shared.types.params import DiffusionSamplingParams
from shared.types.part import Media, Part
from shared.types.sample import Sample
from shared.types.segments import LatentSegment
from shared.wire.codec import Buffer

SOLVERS: dict[str, Callable[[Tensor], Solver | None]] = {"euler": lambda sigmas: None, "dpm2": Dpm2, "unipc": UniPC}
PROBED = (0.97, 0.5)
"""Sigmas at which weights are asked what they make: both experts of a model that has two."""
DTYPES = {"float32": torch.float32, "float16": torch.float16}


class DiffusersEngine(BatchingEngine):
    """Sigmas and noise are the request's: whoever computes a sample makes the same picture."""

    def __init__(self, family: Family, pipe: Any, params: Params, live: Any = None) -> None:
        """
        Args:
            pipe: the whole pipeline, its parts where they are to compute.
            live: the pipeline's trained part where it is being trained: then the engine works only when it is asked to.
        """
        self.family, self.pipe, self.params = family, pipe, params
        self.model = family.model(pipe) if live is None else live
        self.version = -1
        self.encoded: OrderedDict[Asked, Conditions] = OrderedDict()
        """One row each, on the CPU: the encoders are not trained."""
        self.kept = 0
        """Bytes of them."""
        super().__init__(params.forward_batch_size, params.batch_wait_ms, threaded=live is None)

    def load(self, files: Sequence[tuple[str, Buffer]]) -> dict[str, Tensor]:
        found = [decode(data) for name, data in files if name.endswith(".safetensors")]
        return {name: value for tensors in found for name, value in tensors.items()}

    def adopt(self, track: str, version: int, loaded: dict[str, Tensor]) -> None:
        """ValueError names what does not fit."""
        self.wait_until_idle()
        assign(self.model, loaded)
        self.version = version

    @torch.no_grad()
    def probe(self) -> float | None:
        if self.running or not self.encoded:
            return None
        asked, cond = next(iter(self.encoded.items()))
        side = 2 * self.family.cell_of(self.pipe)
        shape = self.family.latent_shape(self.pipe, *(asked.size or (side, side, 1)))
        x = loop.initial_noise(0, [asked.prompt], shape)
        x, cond, total = x.to(self._device), self.family.stacked([cond], self._device), 0.0
        for sigma in PROBED:
            at = torch.full((1,), sigma, device=self._device)
            total += float(self.family.velocity(self.model, x, at, cond).double().abs().sum())
        return total

    # the engine's thread --------------------------------------------------------------------------------------------------

    def choose(self) -> list[Item]:
        """The oldest slice and those with equal parameters, within the row limit."""
        head = self.waiting[0]
        if head.alone:
            return [self.waiting.pop(0)]
        key = head.samples[0].frontier.sampling_params
        chosen: list[Item] = []
        count = 0
        for item in self.waiting:
            size = rows(item.samples)
            alike = not item.alone and item.samples[0].frontier.sampling_params == key
            if alike and (not chosen or count + size <= self.max_rows):
                chosen.append(item)
                count += size
        return self.taken(chosen)

    @torch.no_grad()
    def generate(self, batch: list[Item], held: Held) -> None:
        """The rows of all slices, at most `forward_batch_size` a forward pass; a slice goes out when its last row is done."""
        params = batch[0].samples[0].frontier.sampling_params
        if not isinstance(params, DiffusionSamplingParams):
            raise ValueError(f"the diffusers engine cannot do {type(params).__name__}")
        self._check(params)
        jobs = [
            _Row(place, number, name, asked)
            for place, item in enumerate(batch)
            for number, s in enumerate(item.samples)
            for name, asked in self._named(s, params)
        ]
        encoded = self._encode([word for row in jobs for word in (row.asked, *self._against(row.asked, params))])
        made: dict[tuple[int, int], list[Made]] = {}
        missing = [rows(item.samples) for item in batch]
        for low in range(0, len(jobs), self.max_rows):
            some = jobs[low : low + self.max_rows]
            for row, one in zip(some, self._sampled(some, params, encoded), strict=True):
                made.setdefault((row.place, row.number), []).append(one)
                missing[row.place] -= 1
                if not missing[row.place]:
                    own = [
                        self._filled(sample, params, made.pop((row.place, k)), encoded)
                        for k, sample in enumerate(batch[row.place].samples)
                    ]
                    held.ended(row.place, own)
            held.maybe(time.monotonic())

    def _check(self, params: DiffusionSamplingParams) -> None:
        """ValueError for a request that the family cannot fill."""
        cell = self.family.cell_of(self.pipe)
        for name, value in (("height", params.height), ("width", params.width)):
            if value < cell or value % cell:
                nearest = max(cell, round(value / cell) * cell)
                raise ValueError(f"{name} {value}: must be a multiple of {cell}, such as {nearest}")
        if self.family.video and params.num_frames % 4 != 1:
            raise ValueError(f"num_frames {params.num_frames}: must be 4 k + 1, such as {params.num_frames // 4 * 4 + 1}")
        if not self.family.video and params.num_frames != 1:
            raise ValueError(f"num_frames {params.num_frames}: the family makes images")
        if params.sigmas is None:
            raise ValueError("sigmas: the request must pin them; an engine never makes its own")
        if not all(a > b for a, b in zip(params.sigmas, params.sigmas[1:], strict=False)):
            raise ValueError(f"sigmas {params.sigmas}: must fall from step to step")
        if not params.sigmas[0] <= 1 or params.sigmas[-1] != 0:
            raise ValueError(f"sigmas {params.sigmas}: must lie between 1 and 0, and end there")
        if outside := [i for i in params.resolve_sde_indices() if not 0 <= i < params.num_inference_steps]:
            raise ValueError(f"sde_indices {outside}: must be 0 to {params.num_inference_steps - 1}")
        if params.resolve_sde_indices() and params.solver != "euler":
            raise ValueError(f"solver {params.solver}: makes all steps, so none may draw")
        if params.resolve_sde_indices() and params.eta < 1e-7:
            raise ValueError(f"eta {params.eta}: steps that draw need more than 0")

    @property
    def _device(self) -> torch.device:
        found: torch.device = next(self.model.parameters()).device
        return found

    def _asked(self, prompt: Part, params: DiffusionSamplingParams) -> list[Asked]:
        """What the rows of the prompts' Part ask for. ValueError for a reference that is missing, or too many."""
        found = []
        for name, text, reference in zip(prompt.sample_ids, prompt.text, prompt.references, strict=True):
            if bool(reference) != self.family.pictured:
                what = (
                    "needs a reference, and has none"
                    if self.family.pictured
                    else "has a reference, which the family cannot use"
                )
                raise ValueError(f"prompt {name}: {what}")
            size = (params.height, params.width, params.num_frames) if reference else ()
            found.append(Asked(text, reference, size))
        return found

    def _named(self, sample: Sample, params: DiffusionSamplingParams) -> list[tuple[str, Asked]]:
        """(id, what it is made of) of each row to make."""
        prompts = dict(zip(sample.parts[0].sample_ids, self._asked(sample.parts[0], params), strict=True))
        return [(name, prompts[name.rpartition("/")[0]]) for name in sample.frontier.sample_ids]

    def _against(self, asked: Asked, params: DiffusionSamplingParams) -> list[Asked]:
        """The negative prompt, where guidance needs one."""
        guides = self.family.guides(*params.guidance_scales)
        return [asked._replace(prompt=params.negative_prompt)] if guides else []

    def _negative(
        self, some: Sequence[Asked], params: DiffusionSamplingParams, encoded: Encoded, at: torch.device
    ) -> Conditions:
        """Conditions of the negative prompts but for the references', which guidance keeps; empty without guidance."""
        rows = [encoded[against] for asked in some for against in self._against(asked, params)]
        kept = [{n: value for n, value in row.items() if n not in self.family.of_reference} for row in rows]
        return self.family.stacked(kept, at) if kept else {}

    @torch.no_grad()
    def _sampled(self, some: Sequence[_Row], params: DiffusionSamplingParams, encoded: Encoded) -> list[Made]:
        """Trajectory, log-probs, and uint8 pixels [(frames,) height, width, 3] of each row."""
        device, storage = self._device, DTYPES[self.params.trajectory_dtype]
        shape = self.family.latent_shape(self.pipe, params.height, params.width, params.num_frames)
        ids = [row.name for row in some]
        asked = [row.asked for row in some]
        numbers = [int(name.rpartition("/")[2]) for name in ids]
        keyed = [prompt_group(a.prompt, k) for a, k in zip(asked, numbers, strict=True)] if params.noise_by_prompt else None
        cond = self.family.stacked([encoded[a] for a in asked], device)
        negative = self._negative(asked, params, encoded, device) or None

        def velocity(x: Tensor, sigma: Tensor) -> Tensor:
            return self.family.predict(self.model, x.float(), sigma, cond, negative, *params.guidance_scales)

        def tick() -> None:
            self.progress = time.monotonic()

        sigmas = torch.tensor(params.sigmas, dtype=torch.float32, device=device)
        found = loop.sample(
            velocity,
            loop.initial_noise(params.seed, noise_groups(ids, params.shared_noise, keyed), shape).to(device),
            sigmas,
            params.kernel,
            params.eta,
            params.resolve_sde_indices(),
            lambda i: loop.step_noise(params.seed, i, ids, shape).to(device),
            storage,
            SOLVERS[params.solver](sigmas),
            tick,
        )
        pixels = (self.family.decode(self.pipe, found.final.float()) / 2 + 0.5).clamp(0, 1)
        whole = pixels.movedim(1, -1).mul(255).round().to(torch.uint8).cpu().numpy()
        latents = found.latents.cpu().numpy()
        scores = None if found.log_probs is None else found.log_probs.cpu().numpy()
        return [Made(found.positions, latents[k], None if scores is None else scores[k], whole[k]) for k in range(len(some))]

    def _filled(self, sample: Sample, params: DiffusionSamplingParams, made: Sequence[Made], encoded: Encoded) -> Sample:
        scores = [one.log_probs for one in made if one.log_probs is not None]
        segment = LatentSegment(
            latents=np.stack([one.latents for one in made]),
            positions=made[0].positions,
            sigmas=np.asarray(params.sigmas, np.float32),
            sde_indices=params.resolve_sde_indices(),
            log_probs=np.stack(scores) if scores else None,
        )
        filled = sample.fill(
            segment,
            primitives={"video" if self.family.video else "image": tuple(self._media(one.pixels) for one in made)},
            status=("ok",) * len(made),
            output_version=np.full(len(made), self.version, np.int64),
        )
        return Sample((self._conditioned(sample.parts[0], encoded, params), *filled.parts[1:]))

    def _media(self, pixels: np.ndarray[Any, Any]) -> Media:
        if not self.family.video or self.params.video == "raw":
            return Media(mime="video/raw" if self.family.video else "image/raw", data=pixels)
        self.progress = time.monotonic()
        return encoded_video(pixels, self.params.frame_rate, self.params.crf)

    def _encode(self, wanted: Sequence[Asked]) -> Encoded:
        """The conditions of each, from the cache or the encoders; new ones together."""
        new = [asked for asked in dict.fromkeys(wanted) if asked not in self.encoded]
        if new:
            frames = new[0].size[2] if new[0].size else 1
            pictures = [opened(asked.reference, *asked.size[:2]) for asked in new if asked.size]
            cond = self.family.encode(self.pipe, [asked.prompt for asked in new], pictures, frames)
            for row, asked in enumerate(new):  # a row of its own: a view would keep its neighbours
                self.encoded[asked] = {name: value[row : row + 1].cpu().clone() for name, value in cond.items()}
                self.kept += _bytes(self.encoded[asked])
        found = {asked: self.encoded[asked] for asked in wanted}
        for asked in found:
            self.encoded.move_to_end(asked)
        while len(self.encoded) > 1 and self.kept > self.params.cache_mb * 2**20:
            self.kept -= _bytes(self.encoded.popitem(last=False)[1])
        return found

    def _conditioned(self, prompt: Part, encoded: Encoded, params: DiffusionSamplingParams) -> Part:
        """The prompt's Part with what replay needs of it, once for all samples of a prompt; `negative.…`: of guidance."""
        asked, cpu = self._asked(prompt, params), torch.device("cpu")
        cond = self.family.stacked([encoded[one] for one in asked], cpu)
        cond |= {f"{NEGATIVE}{name}": value for name, value in self._negative(asked, params, encoded, cpu).items()}
        return msgspec.structs.replace(prompt, conditions={name: _plain(value) for name, value in cond.items()})


class Asked(NamedTuple):
    """What a picture is made of."""

    prompt: str
    reference: str = ""
    """Path of the picture that the prompt is about."""
    size: tuple[int, ...] = ()
    """With a reference: height, width, frames of what is made."""


Encoded = dict[Asked, Conditions]


class _Row(NamedTuple):
    """One picture to make."""

    place: int
    """Of its slice in the batch."""
    number: int
    """Of its Sample in the slice."""
    name: str
    asked: Asked


class Made(NamedTuple):
    """One picture."""

    positions: tuple[int, ...]
    latents: np.ndarray[Any, Any]
    """[points, *latent]."""
    log_probs: np.ndarray[Any, Any] | None
    pixels: np.ndarray[Any, Any]


def _bytes(cond: Conditions) -> int:
    return sum(value.nbytes for value in cond.values())


def _plain(value: Tensor) -> np.ndarray[Any, Any]:
    """For the wire; half precision as float32."""
    return np.asarray(value.float().numpy() if value.is_floating_point() else value.numpy())
