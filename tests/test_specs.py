"""Components of installed packages: their specs stand beside the built-in ones, and services run their implementations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import paced
from services.trainer.algorithms import ALGORITHMS
from services.trainer.algorithms.grpo import Grpo
from shared.config import specs
from shared.config.problems import BadInput
from shared.engines import ENGINES


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    paced.install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    specs.registry.cache_clear()
    yield
    monkeypatch.undo()
    specs.registry.cache_clear()


@pytest.mark.usefixtures("installed")
def test_an_algorithm_and_an_engine_from_outside() -> None:
    params = specs.check("algorithm", "paced_grpo", {"clip_range": 0.1, "pace_s": 0.0}, "algorithm")
    made = specs.implementation("algorithm", "paced_grpo", ALGORITHMS)(params)
    assert isinstance(made, Grpo) and made.bounds is not None
    flags = specs.find("algorithm", "paced_grpo", "algorithm").flags
    assert flags == specs.find("algorithm", "grpo", "algorithm").flags
    assert callable(specs.implementation("engine", "paced_transformers", ENGINES))


def test_without_its_package_it_is_unknown() -> None:
    with pytest.raises(BadInput, match="paced_grpo"):
        specs.find("algorithm", "paced_grpo", "algorithm.name")
    with pytest.raises(LookupError, match="no implementation"):
        specs.implementation("algorithm", "grpo", {})
