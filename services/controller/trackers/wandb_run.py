"""Weights & Biases. Offline by default: `wandb sync` uploads what lies in the folder."""

from __future__ import annotations

import wandb

from services.controller.trackers.base import Row, Run
from shared.config.builtin import WandbTracker as Params


class WandbTracker:
    def __init__(self, run: Run, params: Params) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)  # without it, it would write somewhere else
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_transaction_log_flush_interval=0.5,
            reinit="create_new",  # a controller runs several jobs
        )
        self.run = wandb.init(
            project=params.project,
            entity=params.entity,
            name=run.name or run.job,
            id=run.job,
            resume="allow",
            mode=params.mode,
            dir=str(run.folder),
            config=run.config,
            settings=settings,
        )
        for series in run.series:
            self.run.define_metric(f"{series}/step")
            self.run.define_metric(f"{series}/*", step_metric=f"{series}/step")

    def log(self, rows: list[Row]) -> None:
        for row in rows:
            self.run.log(row.named() | {f"{row.series}/step": row.step})

    def close(self) -> None:
        self.run.finish()
