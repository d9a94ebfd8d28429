"""Commands that ask a mesh: jobs, samples, workers. Each prints for people, or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgpack
from rich.console import Console

from shared.media import ENDINGS
from shared.types.metrics import average_metrics
from shared.wire.envelope import ENDED
from unimesh import show
from unimesh.client import Api
from unimesh.home import SCALABLE, Home, api_url, default_state, write_scale

ONE_PAGE = 50


class Failed(click.ClickException):
    """One readable paragraph on standard error; exit code 1."""


def mesh_api() -> Api:
    return Api(api_url())


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def end(view: dict[str, Any]) -> None:
    if view["state"] != "done":
        raise Failed(f"job {view['id']} {view['state']}: {view['reason']}")


def put(value: Any, as_json: bool, table: Callable[[Any], Any]) -> None:
    if as_json:
        print_json(value)
    else:
        Console().print(table(value))


AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print what the API answered.")


@click.command()
@AS_JSON
def status(as_json: bool) -> None:
    """Show whether a mesh answers, its workers, and the jobs that run."""
    api = mesh_api()
    api.get("/readyz")
    jobs = [job for job in api.get("/v1/jobs")["jobs"] if job["state"] not in ENDED]
    found = {"api": api.url, "workers": api.get("/v1/workers"), "jobs": jobs, "streams": api.get("/v1/streams")}
    if as_json:
        print_json(found)
        return
    console = Console()
    console.print(f"the mesh at {api.url} answers", highlight=False)
    for table in (show.workers_table(found["workers"]), show.jobs_table(jobs), show.streams_table(found["streams"])):
        console.print(table)


@click.command()
@click.argument("job")
@AS_JSON
def watch(job: str, as_json: bool) -> None:
    """Watch a job: progress, reward, rates, stage times, what it waits for."""
    api = mesh_api()
    view = show.follow(api, job, Console(quiet=as_json))
    if as_json:
        print_json(view)
    end(view)


@click.command()
@click.option("--state", default=None, help="Only those in this state.")
@click.option("--name", default=None, help="Only those of this name.")
@click.option("--limit", default=100, show_default=True)
@AS_JSON
def jobs(state: str | None, name: str | None, limit: int, as_json: bool) -> None:
    """List jobs, newest first."""
    query = {k: v for k, v in (("state", state), ("name", name), ("limit", limit)) if v is not None}
    put(mesh_api().get("/v1/jobs", **query)["jobs"], as_json, show.jobs_table)


@click.command()
@click.argument("job")
@click.option("--since", default=0, help="Only steps after this one.")
@click.option("--all", "everything", is_flag=True, help="All columns; a wide terminal helps.")
@click.option(
    "--mean", type=click.IntRange(1), default=1, help="One row for so many steps: their means, and the last one's number."
)
@AS_JSON
def steps(job: str, since: int, everything: bool, mean: int, as_json: bool) -> None:
    """Print a job's steps: reward, loss, lengths, stage times."""
    found = mesh_api().get(f"/v1/jobs/{job}/steps", since=since, limit=10_000)
    if mean > 1:
        bunches = [found[i : i + mean] for i in range(0, len(found), mean)]
        found = [average_metrics(bunch) | {"step": bunch[-1]["step"]} for bunch in bunches]
    put(found, as_json, partial(show.steps_table, everything=everything))


@click.command()
@click.argument("job")
@click.option("--step", type=int, default=None)
@click.option("--status", type=click.Choice(["ok", "truncated", "failed"]), default=None)
@click.option("--reward-min", type=float, default=None)
@click.option("--reward-max", type=float, default=None)
@click.option("--group", default=None, help="Only samples of this group id.")
@click.option("--limit", default=20, show_default=True)
@click.option("--raw", is_flag=True, help="Show each sample's stored message as a plain MessagePack reader sees it.")
@AS_JSON
def samples(job: str, limit: int, raw: bool, as_json: bool, **wanted: Any) -> None:
    """Show what a job trained on: prompt, completion, rewards, advantage, version, worker."""
    query = {k: v for k, v in wanted.items() if v is not None}
    api = mesh_api()
    found = api.get(f"/v1/jobs/{job}/samples", limit=limit, **query)["samples"]
    if raw:
        for sample in found:
            body = api.raw(f"/v1/jobs/{job}/body", group=sample["gid"], id=sample["id"])
            click.echo(f"{sample['id']}: {len(body)} bytes\n{msgpack.unpackb(body, strict_map_key=False)!r}")
        return
    put(found, as_json, show.samples_table)


@click.command()
@click.argument("job")
@click.option("--to", "folder", type=click.Path(path_type=Path), default=Path("pictures"), show_default=True)
@click.option("--step", type=int, default=None, help="Only samples of this step; without it evaluations too.")
@click.option("--limit", default=32, show_default=True, help="Most pictures of samples.")
@AS_JSON
def pictures(job: str, folder: Path, step: int | None, limit: int, as_json: bool) -> None:
    """Fetch pictures and videos that a job made: in full while they are there, then their previews."""
    api, found = mesh_api(), []
    place = f"/v1/jobs/{job}"
    query = {} if step is None else {"step": step}
    rows = [row for row in api.get(f"{place}/samples", limit=1000, **query)["samples"] if row["picture"]]
    wanted = [
        (f"step-{r['step']}-{quote(r['id'], safe='')}", r["reward"], f"{place}/picture", {"group": r["gid"], "id": r["id"]})
        for r in rows[:limit]
    ]
    for entry in api.get(place)["evals"] if step is None else ():
        kept = [(p["index"], p["reward"]) for p in entry["previews"] if p.get("picture")]
        at = f"{place}/evals/{entry['suite']}/{entry['tag']}"
        wanted += [(f"{entry['suite']}-{k}-{entry['tag']}", reward, f"{at}/{k}/picture", {}) for k, reward in kept]
    folder.mkdir(parents=True, exist_ok=True)
    for name, reward, path, asked in wanted:
        mime, content = api.file(path, **asked)
        target = folder / f"{name}{ENDINGS.get(mime, '')}"
        target.write_bytes(content)
        found.append({"file": str(target), "reward": reward})
    put(found, as_json, show.pictures_table)


@click.command()
@click.argument("job")
@click.argument("name")
@AS_JSON
def lineage(job: str, name: str, as_json: bool) -> None:
    """Show where a root, group or sample NAME came from and what became of it."""
    put(mesh_api().get(f"/v1/jobs/{job}/lineage", id=name), as_json, show.lineage_tree)


@click.command()
@click.argument("job")
@click.option("--step", type=int, required=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="File to write [default: JOB-STEP.trace.json].")
@AS_JSON
def trace(job: str, step: int, out: Path | None, as_json: bool) -> None:
    """Write who did what when in one step, as a file for ui.perfetto.dev or chrome://tracing."""
    found = mesh_api().get(f"/v1/jobs/{job}/trace", step=step)
    if as_json:
        print_json(found)
        return
    place = out or Path(f"{job}-{step}.trace.json")
    place.write_text(json.dumps(found))
    click.echo(f"{place}: {sum(event['ph'] == 'X' for event in found['traceEvents'])} spans; open it in ui.perfetto.dev")


@click.command()
@click.argument("job")
@click.option("--step", type=int, default=None, help="From the checkpoint of this step [default: the newest].")
@AS_JSON
def restore(job: str, step: int | None, as_json: bool) -> None:
    """Start a job that has ended, or that the mesh does not know (any more), from one of its checkpoints."""
    found = mesh_api().post(f"/v1/jobs/{job}/restore", **({} if step is None else {"step": step}))
    put(found, as_json, lambda f: f"job {f['id']} goes on after step {f['step']}, incarnation {f['incarnation']}")


@click.command()
@click.argument("job")
@click.option("--step", type=int, default=None, help="The version that this step made [default: the newest].")
@click.option("--version", type=int, default=None, help="This version.")
@click.option("--to", "folder", type=click.Path(path_type=Path), required=True, help="Folder for the files.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option("--adapter", is_flag=True, help="The adapter alone, for PEFT, in place of a merged model.")
@AS_JSON
def export(job: str, folder: Path, dtype: str, adapter: bool, as_json: bool, **wanted: int | None) -> None:
    """Write a version as a Hugging Face model folder (adapters merged), or its adapter as a PEFT folder."""
    api = mesh_api()
    body = {k: v for k, v in wanted.items() if v is not None} | {"dtype": dtype, "form": "adapter" if adapter else "model"}
    found = api.post(f"/v1/jobs/{job}/exports", body)
    place = f"/v1/jobs/{job}/exports/{found['id']}"
    while found["state"] in ("waiting", "running"):
        time.sleep(0.3)
        found = api.get(place)
    if found["state"] != "done":
        raise Failed(f"the export failed: {found['error']}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in found["files"]:
        api.save(f"{place}/files/{name}", folder / name)
    if as_json:
        print_json(found | {"folder": str(folder)})
    else:
        click.echo(f"version {found['version']} in {folder}: {', '.join(found['files'])}")


@click.command("dead-letters")
@click.argument("job")
@click.option("--reissue", multiple=True, metavar="ID", help="Issue the prompt of this letter again.")
@click.option("--discard", multiple=True, metavar="ID", help="Throw this letter away.")
@AS_JSON
def dead_letters(job: str, reissue: tuple[str, ...], discard: tuple[str, ...], as_json: bool) -> None:
    """List messages that no worker could do; issue their prompts again, or discard them."""
    api = mesh_api()
    for action, letters in (("reissue", reissue), ("discard", discard)):
        for letter in letters:
            api.post(f"/v1/jobs/{job}/dead-letters/{letter}/{action}")
            click.echo(f"{action}: {letter}", err=as_json)
    put(api.get(f"/v1/jobs/{job}/dead-letters"), as_json, show.letters_table)


@click.command()
@AS_JSON
def workers(as_json: bool) -> None:
    """List agents and what they do."""
    put(mesh_api().get("/v1/workers"), as_json, show.workers_table)


@click.command()
@click.argument("name", required=False)
@AS_JSON
def recipes(name: str | None, as_json: bool) -> None:
    """List recipes, or print the one that is NAMEd."""
    from shared.config.compose import listed, text_of

    if name is not None:
        text = text_of(name)
        print_json({"name": name, "text": text}) if as_json else click.echo(text)
    else:
        print_json(listed()) if as_json else click.echo("\n".join(listed()))


@click.command()
@click.argument("job")
@click.option("--suite", default="", help="Only this one.")
@AS_JSON
def evaluate(job: str, suite: str, as_json: bool) -> None:
    """Run the evaluation suites now, beside training."""
    answer = mesh_api().post(f"/v1/jobs/{job}/evaluate", suite=suite)
    print_json(answer) if as_json else click.echo(f"evaluate: {job}")


@click.command()
@click.argument("job")
@click.argument("wanted", nargs=-1, required=True, metavar="SERVICE=N…")
@AS_JSON
def scale(job: str, wanted: tuple[str, ...], as_json: bool) -> None:
    """Give JOB so many rollout workers (`rollout=3`; `rollout=auto` is its fair share of all), and the mesh so many reward
    agents (`reward=2`). An embedded mesh starts and drains its agents itself; for containers the command that does is printed.
    """
    counts = dict(_count(piece) for piece in wanted)
    api, answer = mesh_api(), {}
    if "rollout" in counts:
        answer = api.post(f"/v1/jobs/{job}/scale", {"rollout": counts["rollout"]})
    else:
        api.get(f"/v1/jobs/{job}")
    agents = {service: count for service, count in counts.items() if count is not None}
    if "rollout" in agents:
        agents["rollout"] += sum(w["service"] == "rollout" and w["job"] not in ("", job) for w in api.get("/v1/workers"))
    home = Home.read(default_state())
    if home is not None and home.api == api.url:
        write_scale(Path(home.state), agents)
        said = "the mesh starts and drains agents: " + ", ".join(f"{s}={n}" for s, n in agents.items()) if agents else ""
    else:
        options = " ".join(f"--scale {service}={count}" for service, count in agents.items())
        said = f"docker compose up --detach --no-recreate {options}" if agents else ""
    if as_json:
        print_json(answer | {"agents": agents, "said": said})
    else:
        click.echo("\n".join(filter(None, [f"scale: {job}" if answer else "", said])))


def _count(text: str) -> tuple[str, int | None]:
    service, _, number = text.partition("=")
    if service == "rollout" and number == "auto":
        return service, None
    if service not in SCALABLE or not number.isdigit() or (service == "rollout" and number == "0"):
        raise click.UsageError(f"{text!r}: give rollout=N, rollout=auto or reward=N (a trainer's ranks are its recipe's)")
    return service, int(number)


def _order(name: str, text: str) -> click.Command:
    @click.command(name, help=text)
    @click.argument("job")
    @AS_JSON
    def run(job: str, as_json: bool) -> None:
        answer = mesh_api().post(f"/v1/jobs/{job}/{name}")
        print_json(answer) if as_json else click.echo(f"{name}: {job}")

    return run


def add_commands(group: click.Group) -> None:
    looking = (status, watch, jobs, steps, samples, pictures, lineage, trace, dead_letters, workers, recipes)
    for command in (*looking, evaluate, export, restore, scale):
        group.add_command(command)
    for name, text in (
        ("pause", "Stop issuing new groups; what is in flight completes."),
        ("resume", "Go on after a pause."),
        ("cancel", "End a job now."),
        ("checkpoint", "Write a checkpoint now."),
    ):
        group.add_command(_order(name, text))
