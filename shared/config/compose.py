"""Recipes: Hydra-composed YAML, one per experiment, under `recipes/<domain>/`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import recipes
from shared.config.problems import BadInput, Problem, bad, unknown

FOLDER = Path(recipes.__file__).parent


def listed(folder: Path = FOLDER) -> list[str]:
    """Names of all recipes, `domain/experiment`. Folders that start with `_` hold shared fragments."""
    found = (p.relative_to(folder).with_suffix("").as_posix() for p in folder.glob("*/*.yaml"))
    return sorted(name for name in found if not name.startswith("_"))


def text_of(name: str, folder: Path = FOLDER) -> str:
    """The recipe's file. BadInput for an unknown name."""
    if name not in listed(folder):
        raise unknown("recipe", name, listed(folder), "unknown recipe")
    return (folder / f"{name}.yaml").read_text()


def compose(name: str, overrides: Sequence[str] = (), folder: Path = FOLDER) -> dict[str, Any]:
    """The recipe as a plain document. BadInput for an unknown name, a bad override, or a resolver that reads the host."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if name not in listed(folder):
        raise unknown("recipe", name, listed(folder), "unknown recipe")
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            tree = hydra_compose(name, overrides=[_forced(o) for o in overrides])
            _refuse_resolvers(OmegaConf.to_container(tree, resolve=False), "")
            document = OmegaConf.to_container(tree, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise BadInput([Problem(field="overrides", value=list(overrides), message=_first(error))]) from error
    except YAMLError as error:
        raise bad("recipe", name, f"is no YAML: {' '.join(str(error).split())}", "a YAML document") from error
    assert isinstance(document, dict)
    if missing := list(_missing(document, "")):
        problems = [Problem(field=field, message="must be given", legal=f"`{field}=VALUE`") for field in missing]
        raise BadInput(problems)
    return {str(k): v for k, v in document.items()}


def _missing(node: Any, path: str) -> Iterator[str]:
    """Paths that the recipe leaves to its user (`???`)."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _missing(value, f"{path}.{key}" if path else str(key))
    elif node == "???":
        yield path


def _forced(override: str) -> str:
    """A key that the file does not spell out may still be legal: the recipe's model decides, not Hydra."""
    bare = override.lstrip("+~")
    return override if override != bare or "=" not in bare else f"++{override}"


def _refuse_resolvers(node: Any, path: str) -> None:
    """Only plain `${key}` references are legal: a recipe that reads the environment or files does not mean one thing."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            _refuse_resolvers(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            _refuse_resolvers(value, f"{path}.{index}")
    elif isinstance(node, str) and "${" in node:
        for piece in node.split("${")[1:]:
            if ":" in piece.split("}")[0]:
                raise bad(path, node, "resolvers are refused", "plain references ${section.key}")


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
