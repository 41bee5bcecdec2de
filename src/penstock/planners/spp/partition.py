"""SPP's dynamic program over layers, stages and consecutive devices of an order (PRM)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from penstock.core.native import SppTable
from penstock.costs.run_tables import Floats
from penstock.costs.stage_costs import depth_function
from penstock.costs.tables import RECOMPUTE_MODES, RECOMPUTES, ChainCosts
from penstock.plan.plan import Plan, Stage
from penstock.planners.choice import Candidate
from penstock.planners.coarse_chain import DeviceLine, LineWindows, windows_of_line


def partition(
    chain: ChainCosts,
    line: DeviceLine,
    micro_batch_size: int,
    schedule: str,
    *,
    drains: bool = False,
) -> "PartitionTable":
    """The least workload of every number of stages on consecutive devices (SPP, PRM).

    ``W(k, lo, p, r)``: layers ``lo`` to the end as ``k`` stages, the first of them on the ``r``
    devices from ``p`` of the line, each other right behind the one before it:

        W(1, lo, p, r) = M * P + R
        W(k, lo, p, r) = min over end hi and next replicas r' of
                         max{ M * P + R,   M * X,   W(k - 1, hi, p + r, r') }

    ``P``: forward, backward and, where memory requires it, recompute of a micro-batch on the
    slowest replica. ``R``: all-reduce and optimizer step. ``X``: the channel, activations down and
    gradients up. ``M``: micro-batches. The recurrence is the paper's, from the last stage to the
    first. So it is known how many micro-batches a stage keeps in flight, and a stage that does not
    fit costs infinity.

    The costs are those of this project: ``P`` of whole rows and unequal devices, and ``X`` of the
    busiest engine or port, where the paper divides by ``r * r'`` and the slowest link. Devices at
    either end of the line may stay idle, where the paper uses all of them.

    Where a table ``drains``, fill and drain count as well:

        V(1, lo, p, r) = M * P + R
        V(k, lo, p, r) = min over end hi and next replicas r' of
                         max{ M * P + R,   M * Y,   P + X + V(k - 1, hi, p + r, r') }

    ``Y`` is the busier direction of the channel. A stage is busy for ``M * P`` between the fill and
    the drain of the stages before it, as in the warm-up and ending phases of DAPPLE (PPoPP 2021).
    ``V`` is not the iteration time. It counts an all-reduce as if it delayed the drain of the
    stages before, and skip tensors as if they passed through every stage.

    The result is exact for either objective; tests compare it with enumeration.
    """
    problem = chain.problem
    most_stages = min(line.blocks, chain.layers, problem.max_stages or chain.layers)
    micro_batches = problem.global_batch // micro_batch_size
    depth = depth_function(schedule)
    windows = windows_of_line(chain, line, micro_batch_size)
    table = SppTable(
        windows.costs,
        windows.network,
        groups=windows.groups.ravel().tolist(),
        width=line.widths,
        depths=[0, *(depth(k, micro_batches) for k in range(1, most_stages + 1))],
        micro_batches=micro_batches,
        recompute=RECOMPUTE_MODES[problem.recompute],
        drains=drains,
    )
    return PartitionTable(windows, schedule, table)


@dataclass(frozen=True)
class PartitionTable:
    """The result of `partition`: a table by stages, first cut, first block and first width."""

    windows: LineWindows
    schedule: str
    table: SppTable

    def workloads(self) -> Floats:
        """The least objective by number of stages and first block in use."""
        return self.table.seconds[:, 0].min(axis=2, initial=inf)

    def candidates(self) -> Iterator[Candidate]:
        """The best plan on the whole line, and on any end of it, for every number of stages.

        The estimate is the workload, or more where fill and drain say so:
        ``sum of (P + X) + (M - 1) * max of P and X``.
        """
        workloads, micro_batches = self.workloads(), self.windows.micro_batches
        for k in range(1, len(workloads)):
            best = int(workloads[k].argmin())
            for position in sorted({0, best}):
                if workloads[k, position] < inf:
                    state = (k, 0, position, self.table.seconds[k, 0, position].argmin())
                    filled_s = self.table.passed_s[state]
                    filled_s += (micro_batches - 1) * self.table.slowest_s[state]
                    workload_s = float(workloads[k, position])
                    yield Candidate(self.plan(k, position), max(float(filled_s), workload_s))

    def plan(self, stages: int, position: int) -> Plan:
        """The best plan of ``stages`` stages from block ``position`` on."""
        windows, table, found, lo = self.windows, self.table, list[Stage](), 0
        number = int(table.seconds[stages, 0, position].argmin())
        for k in range(stages, 0, -1):
            state = (k, lo, position, number)
            hi, again = int(table.end[state]), bool(table.recompute[state] == RECOMPUTES)
            found.append(windows.stage(lo, hi, position, number, recompute=again))
            position += windows.line.widths[number]
            lo, number = hi, int(table.next_number[state])
        return Plan(tuple(found), windows.micro_batches, windows.micro_batch_size, self.schedule)
