"""`python -m services.rollout`: the rollout agent. Heavy imports happen in its child."""

from __future__ import annotations

from shared.agent.agent import Agent, main
from shared.agent.process import guard_parent
from shared.config import specs
from shared.config.settings import from_environment

if __name__ == "__main__":
    guard_parent()
    engines = tuple(specs.names("engine"))
    main(lambda settings: Agent("rollout", settings, "services.rollout.child", engines), from_environment())
