"""`python -m services.trainer`: the trainer agent. Heavy imports happen in its child."""

from __future__ import annotations

from shared.agent.agent import Agent, main
from shared.agent.process import guard_parent
from shared.config import specs
from shared.config.settings import from_environment

if __name__ == "__main__":
    guard_parent()
    algorithms = tuple(specs.names("algorithm"))
    main(lambda settings: Agent("trainer", settings, "services.trainer.child", algorithms), from_environment())
