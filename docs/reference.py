"""Writes docs/api.md and docs/cli.md from the code; with --check, says whether they are current. `make docs`, `make check`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from services.controller.api.app import make_app
from services.reward import score_api
from shared.config.settings import Settings
from unimesh.cli import EXIT_CODES, cli

FOLDER = Path(__file__).parent
NOTE = "<!-- Written by docs/reference.py from the code: `make docs` renews it. -->\n"
METHODS = ("get", "post", "put", "delete")


def api() -> str:
    settings = Settings("redis://127.0.0.1:1", Path("/nowhere"), (), "dir:/nowhere", 1, None)
    parts = [
        "# The HTTP API\n",
        NOTE,
        "A running controller serves the same as OpenAPI: `/openapi.json`, and to try it, `/docs`. Errors are\n"
        "`application/problem+json` with `problems`: field, value, what is legal, the nearest name. Where tokens are asked\n"
        "for, send `Authorization: Bearer …` (`unimesh token`): `read` looks, `submit` changes jobs and scores, `admin` the\n"
        "mesh.\n",
        *operations(make_app(settings).openapi()),
        "## Of the reward service\n",
        *operations(score_api.make_app(settings).openapi()),
    ]
    return "\n".join(parts)


def operations(document: dict[str, Any]) -> Iterator[str]:
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield from operation(document, method, path, item[method])


def operation(document: dict[str, Any], method: str, path: str, found: dict[str, Any]) -> Iterator[str]:
    yield f"### {method.upper()} {path}\n"
    yield f"{found.get('description') or found['summary']}\n"
    if parameters := found.get("parameters"):
        yield "| parameter | in | | |\n|---|---|---|---|"
        for one in parameters:
            need = "required" if one.get("required") else ""
            schema = one["schema"]
            yield f"| `{one['name']}` | {one['in']} | {kind(schema)} {need} | {one.get('description', '')} |"
        yield ""
    body = found.get("requestBody", {}).get("content", {}).get("application/json", {})
    if body:
        schema = resolved(document, body["schema"])
        sent = body.get("example") or (schema.get("examples") or [None])[0]
        yield f"Body: {', '.join(f'`{name}`' for name in schema.get('properties', {}))}\n"
        if sent is not None:
            yield block(sent)
    for code, answer in found["responses"].items():
        given = answer.get("content", {}).get("application/json", {}).get("example")
        if given is not None:
            yield f"Answer {code}:\n"
            yield block(given)
    errors = [code for code, answer in found["responses"].items() if "application/problem+json" in answer.get("content", {})]
    if errors:
        yield f"Errors: {', '.join(errors)}\n"


def kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    return str(schema.get("type", ""))


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"][name] if name else schema
    return found


def block(value: Any) -> str:
    return f"```json\n{json.dumps(value, indent=1, ensure_ascii=False)}\n```\n"


def commands() -> str:
    parts = ["# The command line\n", NOTE, f"{EXIT_CODES}\n"]
    parts.append(
        "`UNIMESH_API` names the controller, `UNIMESH_TOKEN` the token; without them the mesh of the state folder is asked.\n"
    )
    for name, command in sorted(cli.commands.items()):
        context = click.Context(command, info_name=name, parent=click.Context(cli, info_name="unimesh"), max_content_width=110)
        parts.append(f"## unimesh {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for name, text in (("api.md", api()), ("cli.md", commands())):
        place = FOLDER / name
        if not place.exists() or place.read_text() != text:
            stale.append(name)
            if not args.check:
                place.write_text(text)
    if stale and args.check:
        print(f"docs/{', docs/'.join(stale)} are not current: run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
