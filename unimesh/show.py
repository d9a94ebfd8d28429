"""How a job looks in a terminal: one live panel, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from shared.wire.envelope import ENDED
from unimesh.client import Api

BARS = "▁▂▃▄▅▆▇█"
STEP_FIGURES = ("reward", "reward_std", "loss", "grad_norm", "length")
MORE_FIGURES = ("truncated", "failed", "groups_equal", "staleness", "lr", "updates")
STEP_TIMES = ("seconds/rollout", "seconds/reward", "seconds/train", "seconds/waited")


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The series in `width` bars, each the mean of its stretch, on a scale from its least to its largest value."""
    if not values:
        return ""
    step = max(1.0, len(values) / width)
    count = min(width, len(values))
    means = [_mean(values[int(i * step) : max(int(i * step) + 1, int((i + 1) * step))]) for i in range(count)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((m - low) * scale)] for m in means)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def time_left(view: dict[str, Any]) -> str:
    rate = view["rates"].get("steps")
    if not rate:
        return "--:--"
    seconds = int((view["steps"] - view["step"]) / rate)
    return f"{seconds // 60}:{seconds % 60:02d}"


def line(view: dict[str, Any]) -> str:
    """One plain line."""
    last = view["last"] or {}
    parts = [f"{view['name'] or view['id']}", view["state"], f"step {view['step']}/{view['steps']}"]
    if "reward" in last:
        parts.append(f"reward {last['reward']:.3f} ± {last['reward_std']:.3f}")
    if "loss" in last:
        parts.append(f"loss {last['loss']:.4f}")
    for name in ("samples", "tokens"):
        if view["rates"].get(name):
            parts.append(f"{view['rates'][name]:.0f} {name}/s")
    if view["state"] not in ENDED:
        parts += [f"left {time_left(view)}", f"waits for {view['waits_for']}"]
    elif view["bottleneck"]:
        parts.append(view["bottleneck"])
    return "  ".join(parts)


def panel(view: dict[str, Any], steps: Sequence[dict[str, Any]]) -> RenderableType:
    """Bar, reward with its spread, rates, stage times, what it waits for, ledger."""
    last = view["last"] or {}
    head = Text(f"{view['name'] or view['id']}  {view['state']}  step {view['step']}/{view['steps']}  left {time_left(view)}")
    grid = Table.grid(padding=(0, 2))
    if "reward" in last:
        series = [s["reward"] for s in steps if s.get("reward") is not None]
        figure = f"{last['reward']:.3f} ± {last['reward_std']:.3f}  "
        grid.add_row("reward", Text.assemble(figure, (sparkline(series), "green")))
    elif "loss" in last:
        series = [s["loss"] for s in steps if "loss" in s]
        grid.add_row("loss", Text.assemble(f"{last['loss']:.4f}  ", (sparkline(series), "cyan")))
    rates = view["rates"]
    if rates:
        words = [f"{rates[n]:.2f} {n}/s" if n == "steps" else f"{rates[n]:.0f} {n}/s" for n in rates if rates[n]]
        grid.add_row("rates", "  ".join(words))
    stages = {n.removeprefix("seconds/"): v for n, v in last.items() if n.startswith("seconds/")}
    if stages:
        grid.add_row("stages", "  ".join(f"{n} {v:.2f} s" for n, v in stages.items()))
    if "staleness_max" in last:
        grid.add_row("staleness", f"{last['staleness_max']:.0f} updates at most")
    ledger = view["ledger"]
    lost = sum(ledger["dropped"].values())
    counts = f"issued {ledger['issued']} = trained {ledger['trained']} + dropped {lost} + dead {ledger['dead']}"
    grid.add_row("ledger", f"{counts} + in flight {ledger['in_flight']}")
    for newest in {e["suite"]: e for e in sorted(view["evals"], key=lambda e: (e["step"], e["tag"] != "start"))}.values():
        parts = [f"reward {newest['reward']:.3f}"] if newest["reward"] is not None else []
        parts += [f"{name} {newest[name]:.4f}" for name in ("loss", "perplexity") if newest.get(name) is not None]
        parts += [f"{name} {value:.3f}" for name, value in newest.items() if name.startswith("pass@")]
        grid.add_row(newest["suite"], f"{newest['tag']}: {'  '.join(parts)}")
    if view["dead_letters"]:
        grid.add_row("dead letters", str(view["dead_letters"]))
    grid.add_row("waits for", view["waits_for"] or "-")
    if view["bottleneck"]:
        grid.add_row("busy", view["bottleneck"])
    if view["unfilled"]:
        grid.add_row("nobody fills", view["unfilled"])
    bar = ProgressBar(total=max(1, view["steps"]), completed=view["step"], width=60)
    return Group(head, bar, grid)


def follow(api: Api, job: str, console: Console, going: Callable[[], bool] = lambda: True) -> dict[str, Any]:
    """Shows the job until it has ended (or `going` says stop); returns its last view."""
    steps: list[dict[str, Any]] = []

    def look() -> dict[str, Any]:
        view: dict[str, Any] = api.get(f"/v1/jobs/{job}")
        steps.extend(api.get(f"/v1/jobs/{job}/steps", since=steps[-1]["step"] if steps else 0))
        return view

    view = look()
    if not console.is_terminal:
        return _follow_plain(look, view, console, going)
    with Live(panel(view, steps), console=console, refresh_per_second=4) as live:
        while view["state"] not in ENDED and going():
            time.sleep(0.5)
            view = look()
            live.update(panel(view, steps))
    return view


def _follow_plain(
    look: Callable[[], dict[str, Any]], view: dict[str, Any], console: Console, going: Callable[[], bool]
) -> dict[str, Any]:
    shown = 0.0
    while view["state"] not in ENDED and going():
        if time.monotonic() - shown > 5:
            shown = time.monotonic()
            console.print(line(view), soft_wrap=True, highlight=False)
        time.sleep(0.5)
        view = look()
    console.print(line(view), soft_wrap=True, highlight=False)
    return view


def jobs_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("id", "name", "domain", "state", "step", "reason")
    for row in rows:
        table.add_row(row["id"], row["name"], row["domain"], row["state"], f"{row['step']}/{row['steps']}", row["reason"][:60])
    return table


def workers_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("name", "service", "state", "job", "restarts", "error")
    for column in table.columns[:4]:
        column.no_wrap = True
    for row in rows:
        table.add_row(row["name"], row["service"], row["state"], row["job"], str(row["restarts"]), row["error"])
    return table


def streams_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("job", "stage", "waiting", "in hand", "workers", "oldest")
    for row in rows:
        counts = (str(row[n]) for n in ("waiting", "in_hand", "workers"))
        table.add_row(row["job"], row["stage"], *counts, f"{row['oldest_seconds']:.1f} s")
    return table


def steps_table(rows: Sequence[dict[str, Any]], everything: bool = False) -> Table:
    """The columns that any step has, in a fixed order; as many as a narrow terminal holds, or all."""
    figures = [*STEP_FIGURES, *MORE_FIGURES] if everything else STEP_FIGURES
    times = sorted({n for row in rows for n in row if n.startswith("seconds/")}) if everything else STEP_TIMES
    names = [n for n in (*figures, *times) if any(n in row for row in rows)]
    heads = [f"{n.removeprefix('seconds/')} s" if "/" in n else n.replace("_", " ") for n in names]
    table = Table("step", *heads, box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    for row in rows:
        table.add_row(str(row["step"]), *(_figure(row.get(n), 2) for n in names))
    return table


def samples_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("step", "id", "reward", "advantage", "version", "status", "worker", "prompt", "completion")
    for row in rows:
        texts = (Text(row[n]) if row[n] is not None else Text("-", "dim") for n in ("prompt", "completion"))
        parts = row["components"] if len(row["components"]) > 1 else {}
        reward = "\n".join([_figure(row["reward"]), *(f"{n} {_figure(v)}" for n, v in parts.items())])
        made = (_figure(row["advantage"]), _figure(row["version"]), row["status"], row["worker"])
        table.add_row(str(row["step"]), row["id"], reward, *made, *texts)
    return table


def letters_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("id", "group", "stage", "errors", "error")
    for row in rows:
        table.add_row(row["id"], row["gid"], row["stage"], row["errors"], Text(row["error"].strip().splitlines()[-1][:200]))
    return table


def pictures_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("file", "reward")
    for row in rows:
        table.add_row(row["file"], "failed" if row["reward"] is None else f"{row['reward']:.3f}")
    return table


def lineage_tree(groups: Sequence[dict[str, Any]]) -> Tree:
    """Root, issues, samples: who made each, with which version, what it earned, and when it was trained."""
    tree = Tree(groups[0]["root"] if groups else "nothing")
    for group in groups:
        seconds = group["ready_at"] - group["issued_at"]
        scored = ", ".join(f"{n} by {w}" for n, w in group["scored_by"].items())
        branch = tree.add(f"{group['gid']}  ready after {seconds:.2f} s  scored: {scored}")
        branch.add(f"trained in step {group['step']}, record {group['seq']} of incarnation {group['incarnation']}")
        for sample in group["samples"]:
            made = f"part {sample['part']} {sample['track']} v{sample['version']} by {sample['worker']}"
            earned = f"reward {_figure(sample['reward'])}  advantage {_figure(sample['advantage'])}"
            branch.add(f"{sample['id']}  {made}, {sample['tokens']} tokens  {earned}")
    return tree


def _figure(value: Any, digits: int = 4) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def plan_table(answer: dict[str, Any]) -> Table:
    """A dry run: the derived plan, then the estimate."""
    table = Table("of", "figure", "value")
    for part in ("plan", "estimate"):
        for name, value in answer[part].items():
            if isinstance(value, dict) and value:
                for inner, figure in value.items():
                    table.add_row(part, f"{name}.{inner}", _figure(figure))
            elif value not in (None, {}, [], ""):
                table.add_row(part, name, _figure(value))
    return table
