"""Errors as application/problem+json (RFC 9457), with the field, the value and what is legal."""

from __future__ import annotations

from typing import Any

import msgspec
import redis
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shared.config.problems import BadInput, Problem

_TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": _TEXT,
        "title": _TEXT,
        "status": {"type": "integer"},
        "detail": _TEXT,
        "problems": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["field"],
                "properties": {"field": _TEXT, "value": {}, "message": _TEXT, "legal": _TEXT, "nearest": _TEXT},
            },
        },
    },
}
MEANINGS = {
    401: "no token, or one that is not known",
    403: "the token's scope does not allow it",
    404: "there is nothing of that name",
    409: "the job has ended",
    413: "the body is too large",
    422: "something cannot be used; `problems` names each field, its value and what is legal",
    429: "too many wrong tokens",
    503: "Redis is away; nothing was lost",
}


def documented(*more: tuple[int, str]) -> dict[int | str, dict[str, Any]]:
    """The errors that any operation may answer with, for the OpenAPI document; `more` of one's own."""
    return {
        code: {"description": text, "content": {"application/problem+json": {"schema": SCHEMA}}}
        for code, text in (*MEANINGS.items(), *more)
    }


def response(status: int, title: str, detail: str, problems: list[Problem] | None = None) -> JSONResponse:
    body: dict[str, Any] = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    if problems is not None:
        body["problems"] = msgspec.to_builtins(problems)
    return JSONResponse(body, status, media_type="application/problem+json")


def install(app: FastAPI) -> None:
    @app.exception_handler(BadInput)
    async def bad_input(_: Request, error: BadInput) -> JSONResponse:
        return response(422, "the submission cannot be used", str(error), error.problems)

    @app.exception_handler(RequestValidationError)
    async def bad_request(_: Request, error: RequestValidationError) -> JSONResponse:
        found = [Problem(field=".".join(map(str, e["loc"])), message=e["msg"]) for e in error.errors()]
        return response(422, "the request cannot be read", "\n".join(map(str, found)), found)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return response(error.status_code, "request refused", str(error.detail))

    @app.exception_handler(redis.ConnectionError)
    @app.exception_handler(redis.TimeoutError)
    async def away(_: Request, error: redis.RedisError) -> JSONResponse:
        return response(503, "Redis is away", f"nothing was lost; try again ({error})")
