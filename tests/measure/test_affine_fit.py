"""Fits are exact where costs are affine, and never negative."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.measure.affine_fit import fit_affine, fit_layers
from penstock.profile.model_profile import Affine

costs = st.floats(1e-6, 1e3)


@given(fixed=costs, per_sample=costs, samples=st.sets(st.integers(1, 64), min_size=2, max_size=5))
def test_affine_costs_are_found_again(fixed: float, per_sample: float, samples: set[int]) -> None:
    sizes = sorted(samples)
    cost = Affine(fixed, per_sample)
    fit = fit_affine(sizes, [cost.at(size) for size in sizes])
    for size in sizes:
        assert fit.at(size) == pytest.approx(cost.at(size), rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 64), costs), min_size=1, max_size=6))
def test_no_term_is_ever_negative(points: list[tuple[int, float]]) -> None:
    fit = fit_affine([size for size, _ in points], [cost for _, cost in points])
    assert fit.fixed >= 0
    assert fit.per_sample >= 0


def test_no_cost_is_no_cost() -> None:
    assert fit_affine((1, 2), (0.0, 0.0)) == Affine()


@given(st.dictionaries(st.integers(1, 64), st.tuples(costs, costs, costs), min_size=1, max_size=4))
def test_layers_add_up_with_most_samples(seconds: dict[int, tuple[float, ...]]) -> None:
    found = fit_layers(list(seconds), list(seconds.values()))
    most = max(seconds)
    total = sum(layer.at(most) for layer in found)
    assert total == pytest.approx(sum(seconds[most]), rel=1e-9)
