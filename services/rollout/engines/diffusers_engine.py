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

from services.rollout.engines.batching import BatchingEngine, Held, Item, rows
from shared.config.builtin import Diffusers as Params
from shared.models.ar.bundle import assign
from shared.models.diffusion.family import NEGATIVE, Conditions, Family
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
DTYPES = {"float32": torch.float32, "float16": torch.float16}


class DiffusersEngine(BatchingEngine):
    """Sigmas and noise are the request's: whoever computes a sample makes the same picture."""

    def __init__(self, family: Family, pipe: Any, params: Params) -> None:
        """`pipe`: the whole pipeline, its parts where they are to compute."""
        self.family, self.pipe, self.params = family, pipe, params
        self.model = family.model(pipe)
        self.version = -1
        self.encoded: OrderedDict[str, Conditions] = OrderedDict()
        """By prompt, one row each, on the CPU: the encoders are not trained."""
        super().__init__(params.forward_batch_size, params.batch_wait_ms)

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
        prompt, cond = next(iter(self.encoded.items()))
        side = 2 * self.family.cell_of(self.pipe)
        shape = self.family.latent_shape(self.pipe, side, side, 1)
        x = loop.initial_noise(0, [prompt], shape)
        scale = 1.0 if self.family.guides(1.0) else 0.0
        found = self.family.predict(
            self.model, x.to(self._device), torch.full((1,), 0.5, device=self._device), cond, cond, scale
        )
        return float(found.double().abs().sum())

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
            _Row(place, number, name, prompt)
            for place, item in enumerate(batch)
            for number, s in enumerate(item.samples)
            for name, prompt in _named(s)
        ]
        encoded = self._encode([*dict.fromkeys(row.prompt for row in jobs), *self._against(params)])
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
        if any(a <= b for a, b in zip(params.sigmas, params.sigmas[1:], strict=False)):
            raise ValueError(f"sigmas {params.sigmas}: must fall from step to step")
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

    def _against(self, params: DiffusionSamplingParams) -> list[str]:
        """The negative prompt, where guidance needs one."""
        return [params.negative_prompt] if self.family.guides(params.guidance_scale) else []

    @torch.no_grad()
    def _sampled(self, some: Sequence[_Row], params: DiffusionSamplingParams, encoded: dict[str, Conditions]) -> list[Made]:
        """Trajectory, log-probs, and uint8 pixels [(frames,) height, width, 3] of each row."""
        device, storage = self._device, DTYPES[self.params.trajectory_dtype]
        shape = self.family.latent_shape(self.pipe, params.height, params.width, params.num_frames)
        ids = [row.name for row in some]
        keyed = [prompt_group(row.prompt, int(row.name.rpartition("/")[2])) for row in some] if params.noise_by_prompt else None
        cond = self.family.stacked([encoded[row.prompt] for row in some], device)
        against = [encoded[prompt] for prompt in self._against(params)]
        negative = self.family.stacked(against * len(some), device) if against else None

        def velocity(x: Tensor, sigma: Tensor) -> Tensor:
            return self.family.predict(self.model, x.float(), sigma, cond, negative, params.guidance_scale)

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

    def _filled(
        self, sample: Sample, params: DiffusionSamplingParams, made: Sequence[Made], encoded: dict[str, Conditions]
    ) -> Sample:
        scores = [one.log_probs for one in made if one.log_probs is not None]
        segment = LatentSegment(
            latents=np.stack([one.latents for one in made]),
            positions=made[0].positions,
            sigmas=np.asarray(params.sigmas, np.float32),
            sde_indices=params.resolve_sde_indices(),
            log_probs=np.stack(scores) if scores else None,
        )
        kind = "video" if self.family.video else "image"
        filled = sample.fill(
            segment,
            primitives={kind: tuple(Media(mime=f"{kind}/raw", data=one.pixels) for one in made)},
            status=("ok",) * len(made),
            output_version=np.full(len(made), self.version, np.int64),
        )
        return Sample((self._conditioned(sample.parts[0], encoded, params), *filled.parts[1:]))

    def _encode(self, prompts: Sequence[str]) -> dict[str, Conditions]:
        """Each prompt's conditions, from the cache or the encoders; new ones together."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.encoded]
        if new:
            cond = self.family.encode(self.pipe, new)
            for row, prompt in enumerate(new):
                self.encoded[prompt] = {name: value[row : row + 1].cpu() for name, value in cond.items()}
        found = {prompt: self.encoded[prompt] for prompt in prompts}
        for prompt in found:
            self.encoded.move_to_end(prompt)
        while len(self.encoded) > self.params.cached_prompts:
            self.encoded.popitem(last=False)
        return found

    def _conditioned(self, prompt: Part, encoded: dict[str, Conditions], params: DiffusionSamplingParams) -> Part:
        """The prompt's Part with what replay needs of it, once for all samples of a prompt; `negative.…`: of guidance."""
        texts, cpu = prompt.text, torch.device("cpu")
        cond = self.family.stacked([encoded[text] for text in texts], cpu)
        for negative in self._against(params):
            against = self.family.stacked([encoded[negative]] * len(texts), cpu)
            cond |= {f"{NEGATIVE}{name}": value for name, value in against.items()}
        return msgspec.structs.replace(prompt, conditions={name: _plain(value) for name, value in cond.items()})


class _Row(NamedTuple):
    """One picture to make."""

    place: int
    """Of its slice in the batch."""
    number: int
    """Of its Sample in the slice."""
    name: str
    prompt: str


class Made(NamedTuple):
    """One picture."""

    positions: tuple[int, ...]
    latents: np.ndarray[Any, Any]
    """[points, *latent]."""
    log_probs: np.ndarray[Any, Any] | None
    pixels: np.ndarray[Any, Any]


def _named(sample: Sample) -> list[tuple[str, str]]:
    """(id, prompt) of each row to make."""
    prompts = dict(zip(sample.parts[0].sample_ids, sample.parts[0].text, strict=True))
    return [(name, prompts[name.rpartition("/")[0]]) for name in sample.frontier.sample_ids]


def _plain(value: Tensor) -> np.ndarray[Any, Any]:
    """For the wire; half precision as float32."""
    return np.asarray(value.float().numpy() if value.is_floating_point() else value.numpy())
