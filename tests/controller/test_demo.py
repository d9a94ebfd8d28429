"""What the demos ask for is what their recipes have."""

from __future__ import annotations

import pytest

from shared.config.compose import compose
from unimesh.demo import FLOWS, Flow


@pytest.mark.parametrize("flow", FLOWS.values(), ids=lambda flow: flow.__name__)
def test_a_demos_recipe_lacks_nothing_but_what_it_gives(flow: type[Flow]) -> None:
    """compose names whatever a recipe leaves to its user, and whatever it does not have."""
    overrides = getattr(flow, "overrides", ())
    if warm_up := getattr(flow, "warm_up", None):
        places = ("data.source", "eval.held_out.source")
        assert compose(warm_up, ["model.path=x", "seed=1", *(f"{p}.params.path=x" for p in places)])["domain"] == "sft"
    document = compose(flow.recipe, ["model.path=x", "seed=1", *(f"{p}.params.path=x" for p in flow.places), *overrides])
    assert document["model"]["path"] == "x" and document["seed"] == 1
