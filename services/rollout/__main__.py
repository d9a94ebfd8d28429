"""`python -m services.rollout`: the rollout agent. Heavy imports happen in its child."""

from __future__ import annotations

from shared.agent.agent import Agent, main
from shared.agent.process import guard_parent
from shared.config.settings import from_environment

if __name__ == "__main__":
    guard_parent()
    main(lambda settings: Agent("rollout", settings, "services.rollout.child"), from_environment())
