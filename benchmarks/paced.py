"""Components that take as long as on devices of their own: real models whose batches and updates wait until a time is over.

They come as an installed package's would, through the entry-point group `unimesh.specs`; `install` writes what that needs. The
implementations are those of `benchmarks.paced_models`.
"""

from __future__ import annotations

from pathlib import Path

import pydantic

from shared.config import builtin, specs

NAMES = {
    ("engine", "transformers"): "paced_transformers",
    ("engine", "diffusers"): "paced_diffusers",
    ("algorithm", "grpo"): "PacedGrpo",
    ("algorithm", "flow_grpo"): "PacedFlowGrpo",
}
"""By kind and name of a built-in component: what implements the one beside it."""


def entry() -> list[specs.Spec]:
    """A spec `paced_…` beside each of the built-in ones."""
    found = []
    for kind, name, params, about, flags in builtin.TABLE:
        if (kind, name) not in NAMES:
            continue
        paced = pydantic.create_model(f"Paced{params.__name__}", __base__=params, pace_s=(float, 0.0))
        made = f"benchmarks.paced_models:{NAMES[kind, name]}"
        found.append(specs.Spec(kind, f"paced_{name}", paced, about, flags, made))
    return found


def install(folder: Path) -> None:
    """Makes the folder one that, on PYTHONPATH, brings these components."""
    info = folder / "unimesh_paced-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unimesh-paced\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[unimesh.specs]\npaced = benchmarks.paced:entry\n")
