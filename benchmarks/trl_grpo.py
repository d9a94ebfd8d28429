"""TRL's GRPOTrainer on the demo's task: `.venv-bench/bin/python -m benchmarks.trl_grpo MODEL STEPS SEED` prints a JSON line.

The settings make it the same computation: 32 prompts of 8 completions, one update a batch, token mean over the batch, no KL,
clip 0.2, fp32, no checkpointing. TRL divides by the unbiased standard deviation: its advantages are sqrt(7/8) of ours.
"""

from __future__ import annotations

import json
import random
import string
import sys
import tempfile
import time
import zlib
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, GROUP = 32, 8


class Recorder(TrainerCallback):  # type: ignore[misc]
    """When each step ended, and the mean reward that TRL logs for it."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])
            self.ends.append(time.perf_counter() - self.start)


def prompt(seed: int, row: int) -> str:
    """As the `sorting` source draws it."""
    rng = random.Random(f"{seed}:train:{row}")
    while True:
        text = "".join(rng.choice(string.digits) for _ in range(6)) + ">"
        if zlib.crc32(text.encode()) % 10:
            return text


def exact(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(c == "".join(sorted(p[:6]))) for p, c in zip(prompts, completions, strict=True)]


def main() -> None:
    path, steps, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(2)
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            gradient_accumulation_steps=1,
            num_iterations=1,
            max_completion_length=8,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            learning_rate=3e-4,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            adam_beta1=0.9,
            adam_beta2=0.99,
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="dapo",
            scale_rewards="group",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            args=config,
            reward_funcs=exact,
            train_dataset=Dataset.from_dict({"prompt": [prompt(2000 + seed, i) for i in range(steps * PROMPTS)]}),
            processing_class=AutoTokenizer.from_pretrained(path),
            callbacks=[recorder],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    print(json.dumps({"rewards": recorder.rewards, "ends": recorder.ends}))


if __name__ == "__main__":
    main()
