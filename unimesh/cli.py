"""`unimesh`: start a mesh on this machine, launch jobs, watch them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import click
from click.shell_completion import get_completion_class
from rich.console import Console

from shared.config import tokens
from unimesh import show
from unimesh.client import ApiError
from unimesh.commands import Failed, add_commands, end, mesh_api, print_json
from unimesh.doctor import SERVICES, Served, examine
from unimesh.home import Home, default_state, is_held

EXIT_CODES = "Exit codes: 0 done, 1 the job or a check failed, 2 wrong usage or input refused, 3 no controller answers."


@click.group(epilog=EXIT_CODES)
@click.version_option(package_name="unimesh")
@click.option("--debug", is_flag=True, help="Show a traceback where an error is not foreseen.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Reinforcement-learning post-training as a mesh of services."""
    context.obj = debug


def main() -> None:
    debug = "--debug" in sys.argv[1:]
    try:
        cli()
    except ApiError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(3 if error.status == 0 else 2)
    except (OSError, ValueError, RuntimeError) as error:
        if debug:
            raise
        click.echo(f"Error: {error or type(error).__name__} (`unimesh --debug …` shows where)", err=True)
        sys.exit(1)


add_commands(cli)


@cli.command()
@click.option("--rollout", default=1, show_default=True, help="Rollout agents.")
@click.option("--reward", default=1, show_default=True, help="Reward agents.")
@click.option("--trainer", default=1, show_default=True, help="Trainer agents.")
@click.option("--port", default=8080, show_default=True, help="Port of the HTTP API on loopback; 0 takes a free one.")
@click.option("--score-port", default=0, show_default=True, help="Port of POST /score on loopback; 0 takes a free one.")
@click.option("--threads", default=0, help="CPU threads of a computing child; 0 plans them from the cores.")
@click.option("--state", type=click.Path(path_type=Path), default=None, help="State folder [default: .unimesh].")
@click.option("--root", "roots", multiple=True, type=click.Path(path_type=Path), help="Folder for models and data.")
def up(state: Path | None, roots: tuple[Path, ...], **shape: int) -> None:
    """Start a mesh on this machine and tend it. Ctrl-C drains, a second one ends at once."""
    from unimesh.supervisor import EmbeddedMesh, PortTaken, Shape, StateBusy, install_signals

    mesh = EmbeddedMesh(state or default_state(), Shape(**shape), (Path.cwd(), *roots), say=click.echo)
    install_signals(mesh)
    try:
        mesh.start()
    except (PortTaken, StateBusy, RuntimeError) as error:
        mesh.stop()
        raise Failed(str(error)) from error
    click.echo("the mesh is up; Ctrl-C drains it")
    try:
        mesh.run()
    finally:
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
@click.option("--dry-run", is_flag=True, help="Print the derived plan and what it will cost; start nothing.")
@click.option("--follow/--no-follow", default=True, help="Watch it until it has ended.")
@click.option("--json", "as_json", is_flag=True)
def launch(recipe: str, overrides: tuple[str, ...], dry_run: bool, follow: bool, as_json: bool) -> None:
    """Start RECIPE (such as ar/sort) with Hydra overrides: key=value, +key=value, ~key."""
    api = mesh_api()
    answer = api.post("/v1/jobs", {"recipe": recipe, "overrides": list(overrides), "dry_run": dry_run})
    for warning in answer["warnings"]:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        print_json(answer)
    elif dry_run:
        Console().print(show.plan_table(answer))
    if dry_run:
        return
    if not as_json:
        click.echo(f"job {answer['id']}")
    if follow:
        end(show.follow(api, answer["id"], Console()))


@cli.command()
@click.option("--state", type=click.Path(path_type=Path), default=None)
@click.option("--service", type=click.Choice(SERVICES), default=None, help="Only what this service needs.")
@click.option("--json", "as_json", is_flag=True)
def doctor(state: Path | None, service: Served | None, as_json: bool) -> None:
    """Check what a mesh needs of this machine; print the fix of what fails."""
    findings = examine(state or default_state(), service=service)
    if as_json:
        print_json([vars(f) for f in findings])
    else:
        for finding in findings:
            mark = "ok  " if finding.ok else "FAIL"
            click.echo(f"{mark} {finding.name}: {finding.detail}" + ("" if finding.ok else f"\n     fix: {finding.fix}"))
    if not all(f.ok for f in findings):
        raise Failed("some checks failed")


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("service", type=click.Choice(SERVICES))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(service: Served, arguments: tuple[str, ...]) -> None:
    """Run one SERVICE in this process, as containers do. What its doctor finds wrong is said; it starts all the same."""
    for finding in examine(default_state(), service=service):
        if not finding.ok:
            click.echo(f"FAIL {finding.name}: {finding.detail}\n     fix: {finding.fix}", err=True)
    os.execv(sys.executable, [sys.executable, "-m", f"services.{service}", *arguments])


@cli.command()
@click.argument("name")
@click.option("--scope", type=click.Choice(tokens.SCOPES), default="read", show_default=True)
@click.option("--file", "path", type=click.Path(path_type=Path), default=None, help="[default: tokens in the state folder]")
@click.option("--json", "as_json", is_flag=True)
def token(name: str, scope: tokens.Scope, path: Path | None, as_json: bool) -> None:
    """Make a bearer token for NAME. It is shown once; the file keeps its hash, and UNIMESH_TOKENS names it to a controller."""
    place = path or default_state() / "tokens"
    secret, kept = tokens.fresh(name, scope)
    tokens.add(place, kept)
    if as_json:
        print_json({"name": name, "scope": scope, "token": secret, "file": str(place)})
    else:
        click.echo(secret)
        click.echo(f"scope {scope}, kept in {place}; use it as UNIMESH_TOKEN", err=True)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete commands: add `eval "$(unimesh completion bash)"` to its start file."""
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(cli, {}, "unimesh", "_UNIMESH_COMPLETE").source())


@cli.command()
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--domain", type=click.Choice(["ar", "async_ar", "async_diffusion", "diffusion", "sft"]), default="ar", show_default=True
)
@click.option("--model", type=click.Choice(["tiny", "smollm2"]), default="tiny", show_default=True)
@click.option("--steps", default=None, type=int, help="Another number of steps than the recipe's.")
def demo(seed: int, domain: str, model: str, steps: int | None) -> None:
    """Train a tiny model on this machine: ar and diffusion learn from rewards what they had imitated badly; sft imitates."""
    from unimesh.demo import FLOWS, run

    if (domain, model) not in FLOWS:
        raise click.UsageError(f"--domain {domain} has no demo with --model {model}")
    sys.exit(run(seed, domain, model, steps))


if __name__ == "__main__":
    main()
