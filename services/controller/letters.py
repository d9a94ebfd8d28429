"""Dead letters: messages that no worker could do, kept until a person decides."""

from __future__ import annotations

import re
from typing import Any, Literal

from fastapi import HTTPException

from shared.config.problems import bad
from shared.wire.codec import pack
from shared.wire.envelope import Operator
from shared.wire.keys import JobKeys

ID = re.compile(r"\d+-\d+")


def listed(client: Any, job: str, limit: int) -> list[dict[str, Any]]:
    rows = client.xrange(JobKeys(job).dead, count=limit)
    return [{"id": entry_id.decode(), **_shown(fields)} for entry_id, fields in rows]


def settle(client: Any, job: str, letter: str, action: Literal["reissue", "discard"]) -> None:
    """404 for a letter that is not there (any more)."""
    if not ID.fullmatch(letter):
        raise bad("letter", letter, "no id of a letter", "such as 1760000000000-0")
    keys = JobKeys(job)
    found = client.xrange(keys.dead, letter, letter)
    if not found:
        raise HTTPException(404, f"job {job} has no dead letter {letter!r}")
    with client.pipeline(transaction=True) as pipe:
        if action == "reissue":
            pipe.xadd(keys.inbox, {"e": pack(Operator(command="reissue", gid=found[0][1][b"gid"].decode()))})
        pipe.xdel(keys.dead, letter)
        pipe.execute()


def _shown(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {n: fields.get(n.encode(), b"").decode(errors="replace") for n in ("gid", "stage", "errors", "error")}
