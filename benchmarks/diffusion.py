"""The diffusion domain: the mesh against one plain process, and what it moves. `python -m benchmarks.diffusion [--quick]`.

As benchmarks.mesh measures: both processes stand ready and make steps in turn on the same cores. The model is the demo's with
random weights: pictures are worthless, times are the same. The limits of the machine: two shared cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.mesh import FOLDER, Bench, overhead, slopes
from benchmarks.report import Row, publish
from shared.pictures import PROMPTS

LONG = ["data.batch_size=12", "rollout.group_size=256", "train.micro_batch_size=512"]
"""A step of more than 10 s: 3,072 pictures."""
MODEL = """
import sys; from shared.models.diffusion.tiny import make_parts, pipeline
parts, wide = make_parts(0), {"sample_size": 64, "pos_embed_max_size": 32}
pipeline(parts).save_pretrained(sys.argv[1])
larger = type(parts.transformer).from_config({**parts.transformer.config, **wide})
pipeline(parts._replace(transformer=larger)).save_pretrained(sys.argv[2])
"""
LARGE = ["rollout.sampling.height=256", "rollout.sampling.width=256", "rollout.group_size=4", "data.batch_size=1"]
"""Of what a group moves; the demo's own trajectories are of 3 KB, to which the names of its samples add some per cent."""


def prepared(bench: Bench) -> Path:
    """The demo's prompts; its model, untrained."""
    prompts = FOLDER / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    folders = [str(bench.model), str(FOLDER / "diffusion-large")]
    subprocess.run([sys.executable, "-c", MODEL, *folders], check=True, capture_output=True)
    return prompts


def moved(bench: Bench, name: str, folder: Path, limit: float | None, *more: str) -> Row:
    """What a body holds besides the picture that scorers look at, over the stored points of the trajectory alone."""
    command = [sys.executable, "-m", bench.module, str(folder), "sizes", *more]
    env = bench.environment() | {"UNIMESH_ROOTS": str(FOLDER)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    body, trajectory = json.loads(done.stdout.strip().splitlines()[-1])
    return Row(name, body / trajectory, limit, note=f"{body} over {trajectory} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no long steps, no memory")
    args = parser.parse_args()
    bench = Bench("diffusion/demo", "benchmarks.plain_diffusion", "diffusion")
    with bench.up():
        prompts = prepared(bench)
        more = [f"data.source.params.path={prompts}", "eval=null"]
        name = "bytes moved a sample over its trajectory's"
        rows = [moved(bench, f"{name}, 256 x 256", FOLDER / "diffusion-large", 1.05, *more, *LARGE)]
        rows.append(moved(bench, f"{name}, demo", bench.model, None, *more))
        rows.append(overhead(bench, 6 if args.quick else 14, 3, "mesh / plain process, a step of the demo", 1.10, *more))
        if not args.quick:
            rows.append(overhead(bench, 2, 1, "mesh / plain process, a step of over 10 s", 1.03, *more, *LONG))
            rows += slopes(bench, 150, *more)
    return publish("diffusion", rows)


if __name__ == "__main__":
    raise SystemExit(main() > 0)
