"""Cuts a chain over neighbouring devices so that the slowest stage is as fast as possible."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.native import SlowestStageTable, WindowLoad
from penstock.costs.run_tables import at
from penstock.costs.tables import RECOMPUTE_MODES
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import RecomputeChoice
from penstock.planners.coarse_chain import LineWindows


@dataclass(frozen=True)
class SlowestStage:
    """The result of `slowest_stage`."""

    windows: LineWindows
    table: SlowestStageTable

    def seconds(self, position: int) -> float:
        """The slowest stage of all layers on the blocks from ``position`` on."""
        return float(self.table.seconds[position, 0])

    def plan(self, position: int, schedule: str) -> Plan:
        """The plan behind it, without recompute."""
        windows, found, lo = self.windows, list[Stage](), 0
        while lo < windows.chain.layers:
            number, hi = int(self.table.number[position, lo]), int(self.table.end[position, lo])
            found.append(windows.stage(lo, hi, position, number))
            lo, position = hi, position + windows.line.widths[number]
        return Plan(tuple(found), windows.micro_batches, windows.micro_batch_size, schedule)


def slowest_stage(
    windows: LineWindows,
    loads: Sequence[WindowLoad],
    recompute: RecomputeChoice,
    *,
    balanced: bool = False,
) -> SlowestStage:
    """The least slowest stage of every end of the chain on every end of a line of devices.

        T(lo, p) = min over ends hi and widths w of  max{ load(lo, hi, p, w),  T(hi, p + w) }

    ``loads`` are by position, then width. The result is exact; tests compare it with enumeration.
    Of equally good plans, ``balanced`` takes one whose stages are near the slowest, instead of the
    one with the shortest first stage.
    """
    table = SlowestStageTable(
        windows.costs,
        width=windows.line.widths,
        windows=loads,
        crossing_bytes=at(windows.chain.runs.down, windows.micro_batch_size),
        recompute=RECOMPUTE_MODES[recompute],
        balanced=balanced,
    )
    return SlowestStage(windows, table)
