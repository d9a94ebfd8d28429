"""The HTTP API as the command line uses it. Errors are one readable paragraph."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx


class ApiError(Exception):
    """The controller refused, or does not answer. `status` is 0 if it does not answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Api:
    def __init__(self, url: str) -> None:
        self.url = url
        token = os.environ.get("UNIMESH_TOKEN", "")
        self.http = httpx.Client(base_url=url, timeout=120, headers={"Authorization": f"Bearer {token}"} if token else {})

    def get(self, path: str, **query: Any) -> Any:
        return self._send("GET", path, params=query).json()

    def file(self, path: str, **query: Any) -> tuple[str, bytes]:
        """(media type, content)."""
        answer = self._send("GET", path, params=query)
        return answer.headers.get("content-type", "").partition(";")[0], answer.content

    def raw(self, path: str, **query: Any) -> bytes:
        return self._send("GET", path, params=query).content

    def save(self, path: str, target: Path) -> None:
        """A large answer into a file, piece by piece; the file appears once it is whole."""
        temporary = target.with_name(f".{target.name}.part")
        with self.http.stream("GET", path) as answer, temporary.open("wb") as file:
            if not answer.is_success:
                raise ApiError(answer.read().decode(errors="replace"), answer.status_code)
            for piece in answer.iter_bytes(1 << 20):
                file.write(piece)
        temporary.replace(target)

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        return self._send("POST", path, json=body, params=query).json()

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            answer = self.http.request(method, path, **more)
        except httpx.HTTPError as error:
            raise ApiError(f"no controller answers at {self.url} ({error}): start one with `unimesh up`") from error
        if answer.is_success:
            return answer
        try:
            detail = answer.json().get("detail", answer.text)
        except ValueError:
            detail = answer.text
        raise ApiError(str(detail), answer.status_code)
