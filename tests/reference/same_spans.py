"""The engine of the core against a trace of another one."""

import numpy as np
import pytest

from penstock.simulate import compiled
from penstock.simulate.trace import Trace
from penstock.simulate.workload import Workload


def assert_engine_plays(workload: Workload, trace: Trace) -> None:
    """The engine of the core plays every span of ``trace``; without spans it ends as late."""
    found = compiled.play(workload)
    assert len(trace.actions) == workload.actions
    for field in ("actions", "messages", "buckets", "steps", "iteration_s"):
        np.testing.assert_allclose(
            getattr(trace, field), getattr(found, field), 1e-9, 1e-9, err_msg=field
        )
    if not workload.steps_together:
        end_s = compiled.played_s(workload.parts, compiled.orders_of(workload))
        assert end_s == pytest.approx(trace.iteration_s, rel=1e-9)
