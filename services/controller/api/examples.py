"""Examples of the OpenAPI document: requests and answers of a real job, as `docs/record.py` recorded them."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from fastapi import FastAPI


def examples() -> dict[str, dict[str, Any]]:
    """By method and path: `request` and `answer`."""
    text = (resources.files("services.controller.api") / "examples.json").read_text()
    return dict(json.loads(text))


def install(app: FastAPI) -> None:
    """Puts them into the document that the application tells of itself."""
    plain = app.openapi

    def with_examples() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = plain()
        for key, found in examples().items():
            method, _, path = key.partition(" ")
            operation = document["paths"][path][method.lower()]
            if "request" in found:
                operation["requestBody"]["content"]["application/json"]["example"] = found["request"]
            if "answer" in found:
                code = next(code for code in operation["responses"] if code.startswith("2"))
                operation["responses"][code]["content"]["application/json"]["example"] = found["answer"]
        return document

    app.openapi = with_examples  # type: ignore[method-assign]
