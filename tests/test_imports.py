"""Who may import whom, and that nothing torch-free pulls torch in."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVICES = ("controller", "reward", "rollout", "trainer")
TORCH_FREE = (
    "shared.types",
    "shared.wire",
    "shared.config",
    "shared.agent",
    "shared.weights",
    "shared.sde.sigmas",
    "shared.sde.indices",
    "shared.sde.seeds",
    "services.controller",
    "unimesh",
)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(folder: str) -> list[str]:
    """Of a package, or the one module."""
    if (ROOT / f"{folder}.py").exists():
        return [folder.replace("/", ".")]
    found = (p.relative_to(ROOT).with_suffix("") for p in sorted((ROOT / folder).rglob("*.py")))
    return [".".join(p.parts).removesuffix(".__init__") for p in found if p.name != "__main__"]


@pytest.mark.parametrize("service", SERVICES)
def test_services_import_shared_and_never_each_other(service: str) -> None:
    for path in (ROOT / "services" / service).rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            assert parts[0] != "unimesh", f"{path} imports {name}"
            assert parts[0] != "services" or len(parts) == 1 or parts[1] == service, f"{path} imports {name}"


@pytest.mark.parametrize(("folder", "forbidden"), [("shared", {"services", "unimesh"}), ("unimesh", {"services"})])
def test_the_lower_layers_do_not_look_up(folder: str, forbidden: set[str]) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & forbidden, path


@pytest.mark.parametrize("package", TORCH_FREE)
def test_it_imports_with_torch_blocked(package: str) -> None:
    names = modules(package.replace(".", "/"))
    assert names
    code = f"""
import importlib, sys
for name in ("torch", "transformers", "diffusers", "safetensors.torch"):
    sys.modules[name] = None
for name in {names!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-800:]


def test_nothing_unpickles() -> None:
    """No pickle, and no torch.load outside tests: a file or message of another user must not run code."""
    for folder in ("services", "shared", "unimesh"):
        for path in (ROOT / folder).rglob("*.py"):
            names = set(imports(path))
            assert not names & {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}, path
            assert "torch.load(" not in path.read_text(), path
