"""A machine that was busy while it was measured is told, with what shows it."""

from dataclasses import replace

import pytest

from penstock.measure.machine_load import LoadWatch
from penstock.measure.workers import median_profile
from penstock.profile.model_profile import ModelProfile


def watched(load: float, switches: int, slowest: float, shares_cores: bool = False) -> LoadWatch:
    """Ten seconds on two cores; one layer of 1 s, and a tiny one, whose times always vary."""
    told = iter([(load, 100, 0.0), (9.0, 100 + switches, 10.0)])
    watch = LoadWatch(2, shares_cores, lambda: next(told))
    watch.add([1.0, slowest, 1.01])
    watch.add([1e-6, 9e-6])
    return watch


@pytest.mark.parametrize(
    ("watch", "warning"),
    [
        (watched(0.3, 20, 1.2), ""),
        (watched(1.9, 400, 1.4), ""),
        (watched(4.2, 20, 1.02), ""),
        (watched(4.2, 20, 1.04, shares_cores=True), ""),
        (watched(0.3, 5000, 1.4, shares_cores=True), ""),
        (
            watched(4.2, 20, 3.0),
            "machine busy (load 4.2 on 2 cores), times vary by x 3; measure again while nothing "
            "else runs",
        ),
        (
            watched(0.3, 1800, 1.2),
            "machine busy (load 0.3 on 2 cores, 180 involuntary switches a second), times vary by "
            "x 1.2; measure again while nothing else runs",
        ),
        (
            watched(0.3, 20, 2.0),
            "unsteady (load 0.3 on 2 cores), times vary by x 2; measure again while nothing "
            "else runs",
        ),
    ],
)
def test_a_busy_machine_is_told(watch: LoadWatch, warning: str) -> None:
    assert "".join(watch.warnings()) == warning
    assert str(watch) in warning or not warning


def test_what_one_of_several_workers_saw_is_told(small_profile: ModelProfile) -> None:
    busy = replace(small_profile, notes=("machine busy",))
    assert median_profile([small_profile, busy, small_profile]).notes == ("machine busy",)
