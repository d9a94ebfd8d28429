"""`unimesh`: start a mesh on this machine, launch jobs, watch them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from unimesh import show
from unimesh.client import Api, ApiError
from unimesh.home import Home, api_url, default_state, is_held

EXIT_CODES = "Exit codes: 0 done, 1 the job or a check failed, 2 wrong usage or input refused, 3 no controller answers."


class Failed(click.ClickException):
    """One readable paragraph on standard error; exit code 1."""


@click.group(epilog=EXIT_CODES)
@click.version_option(package_name="unimesh")
def cli() -> None:
    """Reinforcement-learning post-training as a mesh of services."""


def main() -> None:
    try:
        cli()
    except ApiError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(3 if error.status == 0 else 2)


def _api() -> Api:
    return Api(api_url())


def _print(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


@cli.command()
@click.option("--rollout", default=1, show_default=True, help="Rollout agents.")
@click.option("--reward", default=1, show_default=True, help="Reward agents.")
@click.option("--trainer", default=1, show_default=True, help="Trainer agents.")
@click.option("--port", default=8080, show_default=True, help="Port of the HTTP API on loopback; 0 takes a free one.")
@click.option("--threads", default=0, help="CPU threads of a computing child; 0 plans them from the cores.")
@click.option("--state", type=click.Path(path_type=Path), default=None, help="State folder [default: .unimesh].")
@click.option("--root", "roots", multiple=True, type=click.Path(path_type=Path), help="Folder for models and data.")
def up(rollout: int, reward: int, trainer: int, port: int, threads: int, state: Path | None, roots: tuple[Path, ...]) -> None:
    """Start a mesh on this machine and tend it. Ctrl-C drains, a second one ends at once."""
    from unimesh.supervisor import EmbeddedMesh, PortTaken, Shape, StateBusy, install_signals

    shape = Shape(rollout=rollout, reward=reward, trainer=trainer, port=port, threads=threads)
    mesh = EmbeddedMesh(state or default_state(), shape, (Path.cwd(), *roots), say=click.echo)
    install_signals(mesh)
    try:
        mesh.start()
    except (PortTaken, StateBusy, RuntimeError) as error:
        mesh.stop()
        raise Failed(str(error)) from error
    click.echo("the mesh is up; Ctrl-C drains it")
    mesh.run()
    mesh.stop()


@cli.command()
@click.option("--state", type=click.Path(path_type=Path), default=None)
def down(state: Path | None) -> None:
    """End the mesh of a state folder: everything drains first."""
    home = Home.read(state or default_state())
    if home is None:
        raise Failed(f"no mesh is up in {state or default_state()}")
    os.kill(home.pid, signal.SIGTERM)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if not is_held(Path(home.state)):
            click.echo("the mesh is down")
            return
        time.sleep(0.1)
    raise Failed(f"the mesh (process {home.pid}) has not ended in 90 s")


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@click.option("--dry-run", is_flag=True, help="Print the derived plan only.")
@click.option("--follow/--no-follow", default=True, help="Watch it until it has ended.")
@click.option("--json", "as_json", is_flag=True)
def launch(recipe: str, overrides: tuple[str, ...], dry_run: bool, follow: bool, as_json: bool) -> None:
    """Start RECIPE (such as ar/sort) with Hydra overrides: key=value, +key=value, ~key."""
    api = _api()
    answer = api.post("/v1/jobs", {"recipe": recipe, "overrides": list(overrides), "dry_run": dry_run})
    for warning in answer["warnings"]:
        click.echo(f"warning: {warning}", err=True)
    if as_json or dry_run:
        _print(answer)
    if dry_run:
        return
    if not as_json:
        click.echo(f"job {answer['id']}")
    if follow:
        _end(show.follow(api, answer["id"], Console()))


def _end(view: dict[str, Any]) -> None:
    if view["state"] != "done":
        raise Failed(f"job {view['id']} {view['state']}: {view['reason']}")


@cli.command()
@click.argument("job")
def watch(job: str) -> None:
    """Watch a job: progress, reward, rates, stage times, what it waits for."""
    _end(show.follow(_api(), job, Console()))


@cli.command()
@click.option("--state", default=None, help="Only those in this state.")
@click.option("--json", "as_json", is_flag=True)
def jobs(state: str | None, as_json: bool) -> None:
    """List jobs, newest first."""
    rows = _api().get("/v1/jobs", **({"state": state} if state else {}))
    if as_json:
        _print(rows)
    else:
        Console().print(show.jobs_table(rows))


def _command(name: str, text: str) -> None:
    @cli.command(name, help=text)
    @click.argument("job")
    def run(job: str) -> None:
        _api().post(f"/v1/jobs/{job}/{name}")
        click.echo(f"{name}: {job}")


_command("pause", "Stop issuing new groups; what is in flight completes.")
_command("resume", "Go on after a pause.")
_command("cancel", "End a job now.")
_command("checkpoint", "Write a checkpoint now.")


@cli.command()
@click.option("--json", "as_json", is_flag=True)
def workers(as_json: bool) -> None:
    """List agents and what they do."""
    rows = _api().get("/v1/workers")
    if as_json:
        _print(rows)
        return
    table = Table("name", "service", "state", "job", "restarts", "error")
    for column in table.columns[:4]:
        column.no_wrap = True
    for row in rows:
        table.add_row(row["name"], row["service"], row["state"], row["job"], str(row["restarts"]), row["error"])
    Console().print(table)


@cli.command()
def recipes() -> None:
    """List recipes."""
    from shared.config.compose import listed

    click.echo("\n".join(listed()))


@cli.command()
@click.option("--state", type=click.Path(path_type=Path), default=None)
@click.option("--json", "as_json", is_flag=True)
def doctor(state: Path | None, as_json: bool) -> None:
    """Check what a mesh needs of this machine; print the fix of what fails."""
    from unimesh.doctor import examine

    findings = examine(state or default_state())
    if as_json:
        _print([vars(f) for f in findings])
    else:
        for finding in findings:
            mark = "ok  " if finding.ok else "FAIL"
            click.echo(f"{mark} {finding.name}: {finding.detail}" + ("" if finding.ok else f"\n     fix: {finding.fix}"))
    if not all(f.ok for f in findings):
        raise Failed("some checks failed")


@cli.command()
@click.option("--seed", default=0, show_default=True)
@click.option("--model", type=click.Choice(["tiny", "smollm2"]), default="tiny", show_default=True)
@click.option("--steps", default=None, type=int, help="Fewer steps than the recipe's.")
def demo(seed: int, model: str, steps: int | None) -> None:
    """Train a tiny model on this machine: a warm start by imitation, then reinforcement learning."""
    from unimesh.demo import run

    sys.exit(run(seed, model, steps))


if __name__ == "__main__":
    main()
