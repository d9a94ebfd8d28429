"""Rows of a benchmark: printed as a table and written to build/bench/NAME.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDER = Path("build/bench")


@dataclass(frozen=True)
class Row:
    """`limit` None: a figure without a promise. `most`: the value must not exceed the limit, otherwise not fall below it."""

    name: str
    value: float
    limit: float | None = None
    most: bool = True
    note: str = ""

    @property
    def holds(self) -> bool:
        if self.limit is None:
            return True
        return self.value <= self.limit if self.most else self.value >= self.limit


def publish(name: str, rows: list[Row]) -> int:
    """Prints and writes; the number of rows that do not hold."""
    table = Table("row", "value", "limit", "holds", "note", title=name)
    for row in rows:
        sign = "" if row.limit is None else ("≤ " if row.most else "≥ ") + f"{row.limit:g}"
        table.add_row(row.name, f"{row.value:.4g}", sign, "yes" if row.holds else "NO", row.note)
    Console(width=170).print(table)
    FOLDER.mkdir(parents=True, exist_ok=True)
    data = [{k: v for k, v in asdict(row).items() if k != "most"} | {"holds": row.holds} for row in rows]
    (FOLDER / f"{name}.json").write_text(json.dumps(data, indent=1))
    return sum(not row.holds for row in rows)
