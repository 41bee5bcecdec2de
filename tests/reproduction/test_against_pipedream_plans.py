"""DAPPLE's fixed plans against PipeDream's, by the authors' own scorer and by our simulator."""

import pytest
from reproduction.fixed_plans import RATIOS, plan_ratio, simulated_ratio

ALLOWED = 0.05


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("model", RATIOS)
def test_dapples_plan_beats_pipedreams_by_the_published_ratio(model: str, shared: bool) -> None:
    least, most = RATIOS[model]
    assert least * (1 - ALLOWED) <= plan_ratio(model, shared) <= most * (1 + ALLOWED)


@pytest.mark.parametrize("shared", [False, True])
def test_the_headline_is_that_of_vgg_19_with_the_batch_of_table_v(shared: bool) -> None:
    assert plan_ratio("vgg-19", shared, 2048) == pytest.approx(3.23, rel=0.01)


def test_by_our_simulator_it_grows_with_the_micro_batch_and_stays_below_the_headline() -> None:
    ratios = [simulated_ratio("vgg-19", 2048, size) for size in (32, 256, 2048)]
    slow = [simulated_ratio("vgg-19", 2048, size, slow_messages=True) for size in (32, 256)]
    assert ratios == sorted(ratios)
    assert 1 <= ratios[0] < slow[0] < max(*ratios, *slow) < 3.23
