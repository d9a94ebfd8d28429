"""`python -m services.reward`: the reward agent. Heavy imports happen in its child."""

from __future__ import annotations

from services.reward.served import devices, served
from shared.agent.agent import Agent, main
from shared.agent.process import guard_parent
from shared.config.settings import Settings, from_environment


def make(settings: Settings) -> Agent:
    names = served()
    return Agent("reward", settings, "services.reward.child", names, assigned=False, devices=devices(names))


if __name__ == "__main__":
    guard_parent()
    main(make, from_environment())
