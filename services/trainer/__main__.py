"""`python -m services.trainer`: the trainer agent. Heavy imports happen in its child."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec
import redis

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
                exports.hold(self.settings, export)
                now = exports.load(self.client, export.id)
                if now is not None and now.state == "running":
                    exports.save(self.client, msgspec.structs.replace(now, beat=time.time()))
                return
            child.kill()
            self.exporting = None
            exports.release(self.settings, export)
            now = exports.load(self.client, export.id)
            if now is not None and now.state == "running":  # it died before it could say how it went
                failed = msgspec.structs.replace(export, state="failed", error=f"the export's process ended with code {code}")
                exports.save(self.client, failed)
        if (wanted := exports.take(self.client, self.storage)) is not None:
            running = msgspec.structs.replace(wanted, state="running", beat=time.time())
            exports.save(self.client, running)
            exports.hold(self.settings, running)
            argv = [sys.executable, "-m", "services.trainer.export", wanted.id]
            log = None if self.settings.logs is None else self.settings.logs / "export.log"
            self.exporting = running, Child(argv, dict(os.environ) | {VISIBLE: ""}, log)

    def leave(self) -> None:
        """An export under way is put back for another agent."""
        if self.exporting is not None:
            export, child = self.exporting
            child.end(grace_s=0)
            with suppress(redis.RedisError):
                now = exports.load(self.client, export.id)
                if now is not None and now.state == "running":
                    exports.ask(self.client, msgspec.structs.replace(now, state="waiting", at=time.time()), self.storage)
        super().leave()


if __name__ == "__main__":
    guard_parent()
    main(TrainerAgent, from_environment())
