"""Weights that get no gradient in a step: for the optimizer it is none, as in torch."""

from runtime.gradients.idle_cases import CASES, every_problem

from penstock.runtime.processes.launch import launch_workers


def test_weights_without_a_gradient_stay_as_in_the_module_left_whole() -> None:
    for found in launch_workers(every_problem, workers=4, threads=1):
        assert set(CASES) < set(found)
        assert not any(found.values()), found
