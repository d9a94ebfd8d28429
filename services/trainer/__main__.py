"""`python -m services.trainer`: the trainer agent. Heavy imports happen in its child."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from shared.agent.agent import Agent, main
from shared.agent.devices import VISIBLE
from shared.agent.process import Child, guard_parent
from shared.config import specs
from shared.config.settings import Settings, from_environment
from shared.weights import exports
from shared.weights.exports import Export


class TrainerAgent(Agent):
    """Also writes exports, one at a time, in a process of their own on the CPU."""

    def __init__(self, settings: Settings, **more: Any) -> None:
        super().__init__("trainer", settings, "services.trainer.child", tuple(specs.names("algorithm")), **more)
        self.exporting: tuple[Export, Child] | None = None

    def chores(self) -> None:
        if self.exporting is not None:
            export, child = self.exporting
            if (code := child.poll()) is None:
                return
            child.kill()
            self.exporting = None
            now = exports.load(self.client, export.id)
            if now is not None and now.state == "running":  # it died before it could say how it went
                failed = msgspec.structs.replace(export, state="failed", error=f"the export's process ended with code {code}")
                exports.save(self.client, failed)
        if (wanted := exports.take(self.client)) is not None:
            running = msgspec.structs.replace(wanted, state="running")
            exports.save(self.client, running)
            argv = [sys.executable, "-m", "services.trainer.export", wanted.id]
            log = None if self.settings.logs is None else self.settings.logs / "export.log"
            self.exporting = running, Child(argv, dict(os.environ) | {VISIBLE: ""}, log)

    def leave(self) -> None:
        super().leave()
        if self.exporting is not None:
            self.exporting[1].end(grace_s=0)


if __name__ == "__main__":
    guard_parent()
    main(TrainerAgent, from_environment())
