"""One plan for a large cluster, from its name to its iteration time, in a process of its own."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import process_time

from pipelines import Case, pipeline_of

from penstock.simulate.catalogue import Catalogue
from penstock.simulate.compiled import iteration_s
from penstock.simulate.orders import orders_of_plan

__all__ = ["LARGE", "SMALL", "LargeRun", "run_apart"]

LARGE = Case(
    "1,024 devices, 4,096 micro-batches",
    1024,
    1,
    4096,
    1024,
    boundary_bytes=4e6,
    link_bytes_per_s=2e11,
    devices_of_host=8,
)
SMALL = Case("16 devices, 64 micro-batches", 16, 1, 64, 16, link_bytes_per_s=2e11)
GIVE_UP_S = 600


@dataclass(frozen=True)
class LargeRun:
    """Processor seconds of each step and the most memory that the process had used."""

    name: str
    compute_actions: int
    order_s: float
    parts_s: float
    engine_s: float
    actions_per_s: float
    peak_bytes: int
    peak_bytes_before: int
    iteration_s: float


def measure(case: Case) -> LargeRun:
    """Order, parts, engine, after a small run that imports everything."""
    play(SMALL)
    before = peak_bytes()
    times, actions, end_s = play(case)
    return LargeRun(
        case.name,
        actions,
        *times,
        actions / times[-1],
        peak_bytes(),
        before,
        end_s,
    )


def play(case: Case) -> tuple[tuple[float, float, float], int, float]:
    """Seconds of the three steps, compute actions, and seconds of the iteration."""
    pipeline = pipeline_of(case)
    clock = [process_time()]
    orders = orders_of_plan(pipeline.plan)
    clock.append(process_time())
    catalogue = Catalogue(pipeline.problem.profile, pipeline.problem.cluster)
    parts = catalogue.parts_of(pipeline.plan, orders.instances)
    clock.append(process_time())
    end_s = iteration_s(parts, orders)
    clock.append(process_time())
    actions = 2 * case.stages * case.replicas * case.micro_batches
    steps = (clock[1] - clock[0], clock[2] - clock[1], clock[3] - clock[2])
    return steps, actions, end_s


def peak_bytes() -> int:
    """The most memory that this process has used."""
    return getrusage(RUSAGE_SELF).ru_maxrss * 1024


def run_apart() -> LargeRun:
    """`measure` of `LARGE` in a process of its own, whose memory is its alone."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=True,
    )
    return LargeRun(**json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(asdict(measure(LARGE))))
