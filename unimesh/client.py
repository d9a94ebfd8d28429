"""The HTTP API as the command line uses it. Errors are one readable paragraph."""

from __future__ import annotations

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
        self.http = httpx.Client(base_url=url, timeout=120)

    def get(self, path: str, **query: Any) -> Any:
        return self._send("GET", path, params=query)

    def post(self, path: str, body: Any = None) -> Any:
        return self._send("POST", path, json=body)

    def _send(self, method: str, path: str, **more: Any) -> Any:
        try:
            answer = self.http.request(method, path, **more)
        except httpx.HTTPError as error:
            raise ApiError(f"no controller answers at {self.url} ({error}): start one with `unimesh up`") from error
        if answer.is_success:
            return answer.json()
        try:
            detail = answer.json().get("detail", answer.text)
        except ValueError:
            detail = answer.text
        raise ApiError(str(detail), answer.status_code)
