"""Golden topic 12, `average_metrics`, and what it leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from shared.types.metrics import average_metrics
from tests.vectors import Case, cases


@pytest.mark.parametrize("case", cases("12_supervised", "average_metrics"))
def test_average_metrics(case: Case) -> None:
    found, wanted = average_metrics(case.params["dicts"]), case.expect["result"]
    assert found.keys() == wanted.keys()
    case.close(list(found.values()), [wanted[name] for name in found])


def test_arrays_count_as_their_mean_and_what_is_no_number_is_left_out() -> None:
    found = average_metrics(
        [{"a": np.asarray([1, 2], np.float32), "b": [], "c": ["x"], "d": np.zeros(0), "e": {}}, {"a": True}]
    )
    assert found == {"a": 1.25}
