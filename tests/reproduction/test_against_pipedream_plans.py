"""DAPPLE's fixed plans against PipeDream's, by the authors' own scorer (`fixed_plans`)."""

import pytest
from reproduction.fixed_plans import RATIOS, plan_ratio

ALLOWED = 0.05


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("model", RATIOS)
def test_dapples_plan_beats_pipedreams_by_the_published_ratio(model: str, shared: bool) -> None:
    least, most = RATIOS[model]
    assert least * (1 - ALLOWED) <= plan_ratio(model, shared) <= most * (1 + ALLOWED)
