"""The table of what policy P_B gains over P_A, by three models of the links."""

import pytest
from reproduction.warm_up_depth import (
    ACRS,
    GAINS,
    PUBLISHED_GAINS,
    clock_gain,
    own_links_gain,
    simulated_gain,
)

HALF_A_PLACE = 0.005 + 1e-9
CELLS = [
    (stages, acr, gain)
    for stages, gains in GAINS.items()
    for acr, gain in zip(ACRS, gains, strict=True)
]


@pytest.mark.parametrize(("stages", "acr", "gain"), CELLS)
def test_with_links_of_their_own_the_table_comes_out_to_its_last_place(
    stages: int, acr: float, gain: float
) -> None:
    assert abs(own_links_gain(stages, acr) - gain) <= HALF_A_PLACE


@pytest.mark.parametrize(("stages", "acr", "gain"), CELLS)
def test_the_simulator_gives_the_same_on_separate_links(
    stages: int, acr: float, gain: float
) -> None:
    assert abs(simulated_gain(stages, acr, separate_links=True) - gain) <= HALF_A_PLACE


@pytest.mark.parametrize(("stages", "acr", "gain"), [c for c in CELLS if c[1] <= 2])
def test_the_clock_of_schedules_gives_the_same_up_to_an_acr_of_two(
    stages: int, acr: float, gain: float
) -> None:
    assert abs(clock_gain(stages, acr) - gain) <= HALF_A_PLACE


@pytest.mark.parametrize(("stages", "acr", "gain"), [c for c in CELLS if c[1] <= 0.75 or c[0] == 2])
def test_the_simulator_gives_the_same_while_an_engine_each_way_is_enough(
    stages: int, acr: float, gain: float
) -> None:
    assert abs(simulated_gain(stages, acr) - gain) <= HALF_A_PLACE


@pytest.mark.parametrize("stages", [4, 8, 16])
def test_beyond_an_acr_of_one_a_devices_engine_binds_both_policies(stages: int) -> None:
    """A device in the midst sends two messages a micro-batch: at ACR 2 they take as long as twice
    its work, whatever the order, so that less is left to gain."""
    assert 1 <= simulated_gain(stages, 4.0) < simulated_gain(stages, 1.0)
    assert simulated_gain(stages, 2.0) < own_links_gain(stages, 2.0)


@pytest.mark.parametrize("stages", GAINS)
def test_deeper_warm_up_never_loses_and_gains_with_communication(stages: int) -> None:
    gains = [simulated_gain(stages, acr) for acr in ACRS if acr <= 1]
    assert gains == sorted(gains) and gains[0] == pytest.approx(1)


def test_the_ratios_of_the_paper_lie_in_the_range() -> None:
    gains = [own_links_gain(stages, acr) for stages in GAINS for acr in ACRS]
    assert min(gains) <= min(PUBLISHED_GAINS.values())
    assert max(PUBLISHED_GAINS.values()) <= max(gains)
