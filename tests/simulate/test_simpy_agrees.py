"""An independent SimPy model of the rules gives the same times, for pipelines of every kind."""

from dataclasses import replace
from math import isclose
from random import Random

import pytest
from random_pipelines import random_pipeline
from reference.simpy_model import iteration_s

from penstock.simulate import compiled
from penstock.simulate.catalogue import workload_of

INSTANCES, DIVIDED = 240, 60


@pytest.mark.parametrize("seed", range(INSTANCES + DIVIDED))
def test_an_independent_model_gives_the_same_time(seed: int) -> None:
    made = random_pipeline(Random(seed), divided=seed >= INSTANCES)
    inputs = (made.plan, made.profile, made.cluster, made.schedule)
    workload = workload_of(*inputs, iterations=made.iterations)
    simulated_s = compiled.play(workload).iteration_s
    assert isclose(simulated_s, iteration_s(*inputs, made.iterations), rel_tol=1e-9)


@pytest.mark.parametrize("seed", range(5000, 5120))
def test_steps_that_wait_for_the_sums_of_all_devices_do(seed: int) -> None:
    made = random_pipeline(Random(seed), flushes=True)
    inputs = (made.plan, made.profile, made.cluster, made.schedule)
    workload = replace(workload_of(*inputs, iterations=3), steps_together=True)
    simulated_s = compiled.play(workload).iteration_s
    assert isclose(simulated_s, iteration_s(*inputs, 3, together=True), rel_tol=1e-9)
