"""Cuts a chain over neighbouring devices so that the slowest stage is as fast as possible."""

from dataclasses import dataclass
from typing import NamedTuple

from penstock.core.native import SlowestStageQuestion, SlowestStageTable, WindowLoad
from penstock.costs.run_tables import Floats, Integers, at
from penstock.costs.tables import RECOMPUTE_MODES, ChainCosts
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import RecomputeChoice
from penstock.planners.coarse_chain import LineWindows


class Loads(NamedTuple):
    """The load of a stage on each window of a line beside computing, by position, then width.

    ``depth``: its micro-batches in flight. ``replicas`` share the messages. The others are seconds
    for each byte that crosses its first and its last cut, and for each byte of its parameters.
    """

    depth: Integers
    replicas: Integers
    before_s_per_byte: Floats
    after_s_per_byte: Floats
    parameter_s_per_byte: Floats


@dataclass(frozen=True)
class SlowestStage:
    """The result of `slowest_stage`."""

    chain: ChainCosts
    windows: LineWindows
    micro_batch_size: int
    table: SlowestStageTable

    def seconds(self, position: int) -> float:
        """The slowest stage of all layers on the blocks from ``position`` on."""
        return float(self.table.seconds[position, 0])

    def plan(self, position: int, schedule: str) -> Plan:
        """The plan behind it, without recompute."""
        windows, chain = self.windows, self.chain
        found: list[Stage] = []
        lo = 0
        while lo < chain.layers:
            number, hi = int(self.table.number[position, lo]), int(self.table.end[position, lo])
            group = int(windows.groups[position, number])
            layers = chain.layers_of(lo, hi)
            found.append(Stage(layers, windows.devices[group], windows.slices[group]))
            lo, position = hi, position + windows.line.widths[number]
        micro_batches = chain.problem.global_batch // self.micro_batch_size
        return Plan(tuple(found), micro_batches, self.micro_batch_size, schedule)


def slowest_stage(
    chain: ChainCosts,
    windows: LineWindows,
    loads: Loads,
    micro_batch_size: int,
    recompute: RecomputeChoice,
    *,
    balanced: bool = False,
) -> SlowestStage:
    """The least slowest stage of every end of the chain on every end of a line of devices.

        T(lo, p) = min over ends hi and widths w of  max{ load(lo, hi, p, w),  T(hi, p + w) }

    The result is exact; tests compare it with enumeration. Of equally good plans, ``balanced``
    takes one whose stages are near the slowest, instead of the one with the shortest first stage.
    """
    parts = (windows.groups, *loads)
    rows = zip(*(part.ravel().tolist() for part in parts), strict=True)
    question = SlowestStageQuestion(
        width=windows.line.widths,
        windows=[WindowLoad(*row) for row in rows],
        crossing_bytes=at(chain.runs.down, micro_batch_size),
        recompute=RECOMPUTE_MODES[recompute],
        balanced=balanced,
    )
    table = SlowestStageTable(windows.costs, question)
    return SlowestStage(chain, windows, micro_batch_size, table)
