"""Runs `benchmarks/gpu.py` with a fault planted in what one of its parts judges.

python gpu_benchmark_fault.py FAULT [arguments of benchmarks/gpu.py]
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def a_failing_test() -> Iterator[None]:
    """The tests of a GPU are one that fails."""
    import facts

    text = "import pytest\n@pytest.mark.cuda\ndef test_memory():\n    assert 1 == 2\n"
    with TemporaryDirectory() as place, patch.object(facts, "TESTS", Path(place)):
        (Path(place) / "cuda").mkdir()
        (Path(place) / "cuda" / "test_device_on_cuda.py").write_text(text)
        yield


def a_wrong_gradient() -> Any:
    """Every gradient is a little too large."""
    from penstock.runtime.pipeline import Pipeline

    step = Pipeline.step

    def wrong(self: Any, *batches: Any) -> Any:
        found = step(self, *batches)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.01)
        return found

    return patch.object(Pipeline, "step", wrong)


def a_host_wait() -> Any:
    """Each forward of a stage reads a number of the GPU."""
    from penstock.runtime.stages.runner import ModuleRunner

    forward = ModuleRunner.forward

    def waiting(self: Any, *given: Any, **named: Any) -> Any:
        found = forward(self, *given, **named)
        for tensor in found or ():
            float(tensor.detach().sum())
        return found

    return patch.object(ModuleRunner, "forward", waiting)


def faulty_ranks(cases: Sequence[Any], device: str, stand_in: bool) -> dict[str, list[str]]:
    """Ranks that learn twice as fast as the one process with which they are compared."""
    from dataclasses import replace

    from judged_ranks import as_one_process

    fast = [replace(case, haste=2.0) for case in cases]
    found = as_one_process(fast, device, stand_in)
    return {str(case): found[str(hasty)] for case, hasty in zip(cases, fast, strict=True)}


def ranks_that_learn_too_fast() -> Any:
    """See `faulty_ranks`."""
    import gpu_benchmark_fault
    import judged_ranks

    return patch.object(judged_ranks, "as_one_process", gpu_benchmark_fault.faulty_ranks)


def another_order() -> Any:
    """A rank alone is said to have done its last action twice."""
    import lonely_rank

    order_of = lonely_rank.order_of

    class Longer:
        def __init__(self, plan: Any) -> None:
            self.schedule = order_of(plan)

        def of(self, group: int) -> list[Any]:
            """The order, with one action more."""
            return [*self.schedule.of(group), self.schedule.of(group)[-1]]

    return patch.object(lonely_rank, "order_of", Longer)


FAULTS: dict[str, Callable[[], Any]] = {
    "1.1": a_failing_test,
    "1.2": a_wrong_gradient,
    "1.3": a_host_wait,
    "1.4": ranks_that_learn_too_fast,
    "2.1": another_order,
}
"""By the part that must be red."""


def main() -> int:
    """Run with the fault."""
    sys.path[0] = str(ROOT / "benchmarks")
    sys.path.append(str(Path(__file__).parent))
    fault = sys.argv.pop(1)
    import gpu

    with FAULTS[fault]():
        return gpu.main()


if __name__ == "__main__":
    sys.exit(main())
