"""Runs a real mesh and records it: docs/session.svg for the README, and the examples of the API. `make record`."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from unimesh import show
from unimesh.client import Api
from unimesh.home import Home

FOLDER = Path(__file__).parent
STATE = Path("build/record/state").resolve()
EXAMPLES = Path("services/controller/api/examples.json")
WIDTH = 118
REQUEST = {"recipe": "ar/sort", "overrides": ["model.path=job:0123456789ab", "steps=40"]}


def main() -> None:
    shutil.rmtree(STATE.parent, ignore_errors=True)
    STATE.mkdir(parents=True)
    model = STATE.parent / "tiny"
    subprocess.run([sys.executable, "-m", "shared.models.ar.tiny", str(model), "0"], check=True, capture_output=True)
    command = ["unimesh", "up", "--state", str(STATE), "--port", "8080", "--root", str(STATE.parent)]
    up = subprocess.Popen([sys.executable, "-m", "unimesh.cli", *command[1:]], stdout=subprocess.PIPE, text=True)
    try:
        assert up.stdout is not None
        said = [up.stdout.readline() for _ in range(4)]
        home = Home.read(STATE)
        assert home is not None, said
        record(Api(home.api), said, model)
    finally:
        up.terminate()
        up.wait(60)


def record(api: Api, said: list[str], model: Path) -> None:
    quiet = Console(file=io.StringIO())
    warm = api.post("/v1/jobs", {"recipe": "sft/sort", "overrides": [f"model.path={model}"]})["id"]
    show.follow(api, warm, quiet)
    overrides = [f"model.path=job:{warm}", "steps=40", "eval.held_out.size=128", "train.checkpoint_every=20"]
    job = api.post("/v1/jobs", {"recipe": "ar/sort", "overrides": overrides})["id"]
    session = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO(), color_system="truecolor")
    line(session, "unimesh up &")
    for text in said:
        session.print(clean(text.rstrip()), highlight=False, soft_wrap=True)
    line(session, f"unimesh launch ar/sort model.path=job:{warm} steps=40 --follow")
    session.print(f"job {job}", highlight=False)
    middle = halfway(api, job)
    session.print(show.panel(*middle))
    show.follow(api, job, quiet)
    time.sleep(2)  # the recorder takes in the last step
    session.print(show.panel(api.get(f"/v1/jobs/{job}"), api.get(f"/v1/jobs/{job}/steps")))
    line(session, f"unimesh samples {job} --step 2 --limit 8")
    found = api.get(f"/v1/jobs/{job}/samples", step=2, limit=8)["samples"]
    session.print(show.samples_table(json.loads(clean(json.dumps(found)))))
    session.save_svg(str(FOLDER / "session.svg"), title="UniMesh")
    EXAMPLES.write_text(clean(json.dumps(recorded(api, job), indent=1, ensure_ascii=False)) + "\n")


def clean(text: str) -> str:
    """Without the places and the name of the machine that it was recorded on."""
    return text.replace(str(STATE.parent), "/data").replace(socket.gethostname(), "host")


def line(session: Console, command: str) -> None:
    session.print(Text.assemble(("$ ", "bold green"), (command, "bold")))


def halfway(api: Api, job: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    while (view := api.get(f"/v1/jobs/{job}"))["step"] < 20:
        time.sleep(0.1)
    return view, api.get(f"/v1/jobs/{job}/steps")


def recorded(api: Api, job: str) -> dict[str, dict[str, Any]]:
    """One request and answer of each kind, lists cut to one entry."""
    sample = api.get(f"/v1/jobs/{job}/samples", limit=1)
    gid = sample["samples"][0]["gid"]
    dry = api.post("/v1/jobs", {"recipe": "ar/sort", "overrides": [f"model.path={api_model(api, job)}"], "dry_run": True})
    view = api.get(f"/v1/jobs/{job}")
    trace = api.get(f"/v1/jobs/{job}/trace", step=40)
    lineage = api.get(f"/v1/jobs/{job}/lineage", id=gid)
    return {
        "POST /v1/jobs": {"request": REQUEST, "answer": {"id": job, "plan": dry["plan"], "warnings": dry["warnings"]}},
        "GET /v1/jobs": {"answer": {"jobs": api.get("/v1/jobs")["jobs"][:1], "next": None}},
        "GET /v1/jobs/{job}": {"answer": view | {"evals": [e | {"previews": e["previews"][:1]} for e in view["evals"][:1]]}},
        "GET /v1/jobs/{job}/steps": {"answer": api.get(f"/v1/jobs/{job}/steps")[-1:]},
        "GET /v1/jobs/{job}/samples": {"answer": sample},
        "GET /v1/jobs/{job}/lineage": {"answer": [one | {"samples": one["samples"][:1]} for one in lineage]},
        "GET /v1/jobs/{job}/trace": {"answer": trace | {"traceEvents": trace["traceEvents"][:2]}},
        "POST /v1/jobs/{job}/{command}": {"answer": {"id": job, "command": "pause"}},
        "GET /v1/workers": {"answer": api.get("/v1/workers")[:1]},
        "GET /v1/components": {"answer": api.get("/v1/components", kind="tracker")[:1]},
        "GET /v1/recipes": {"answer": api.get("/v1/recipes")[:1]},
    }  # fmt: skip


def api_model(api: Api, job: str) -> str:
    return str(api.get(f"/v1/jobs/{job}/recipe")["recipe"]["model"]["path"])


if __name__ == "__main__":
    main()
