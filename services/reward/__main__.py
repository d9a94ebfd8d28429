"""`python -m services.reward`: the reward agent. Heavy imports happen in its child."""

from __future__ import annotations

import os

from shared.agent.agent import Agent, main
from shared.agent.process import guard_parent
from shared.config import specs
from shared.config.settings import Settings, from_environment


def make(settings: Settings) -> Agent:
    served = tuple(n for n in os.environ.get("UNIMESH_SCORERS", "").split(",") if n) or tuple(specs.names("scorer"))
    return Agent("reward", settings, "services.reward.child", served, assigned=False)


if __name__ == "__main__":
    guard_parent()
    main(make, from_environment())
