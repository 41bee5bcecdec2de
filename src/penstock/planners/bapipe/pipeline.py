"""One accelerator for each stage: the pipelines that BaPipe balances, with their closed forms."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from penstock.cluster.cluster import Cluster
from penstock.plan.compiled_cost import needed_bytes
from penstock.plan.cost import depth_function
from penstock.plan.cost_tables import ChainCosts, Costs
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import at
from penstock.planners.bapipe.formulas import (
    Method,
    features_kept,
    method_of,
    mini_batch_s,
    pace_s,
)
from penstock.planners.bapipe.partition import (
    coarse_cuts,
    inter_layer_cuts,
    intra_layer_shares,
    memory_fine_tuned,
)
from penstock.planners.gpipe import fastest_devices

__all__ = ["StraightPipeline", "is_asynchronous"]


def is_asynchronous(cluster: Cluster) -> bool:
    """Whether all accelerators work on several passes and transfers at once, as FPGAs do."""
    return all(device.concurrent_passes for device in cluster.devices)


@dataclass(frozen=True)
class StraightPipeline:
    """A chain of layers on a chain of single accelerators, for one micro-batch size and schedule.

    All of a cluster's accelerators, or the fastest where there are fewer layers.
    """

    chain: ChainCosts
    micro_batch_size: int
    schedule: str
    recompute: bool

    @property
    def problem(self) -> PlanningProblem:
        """What is asked."""
        return self.chain.problem

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The accelerators in order."""
        return fastest_devices(self.problem)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Their speeds."""
        return tuple(self.problem.cluster.devices[device].speed for device in self.devices)

    @cached_property
    def layers_s(self) -> list[float]:
        """Seconds of each layer for a micro-batch at speed 1."""
        size, again = self.micro_batch_size, float(self.recompute)
        return [
            layer.forward_s.at(size) * (1 + again) + layer.backward_s.at(size)
            for layer in self.problem.profile.layers
        ]

    @cached_property
    def prefix_s(self) -> list[float]:
        """Seconds of the layers before each cut."""
        return list(accumulate(self.layers_s, initial=0.0))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an iteration."""
        return self.problem.global_batch // self.micro_batch_size

    @property
    def method(self) -> Method:
        """BaPipe's name for the schedule on these accelerators."""
        asynchronous = is_asynchronous(self.problem.cluster)
        return method_of(self.schedule, asynchronous=asynchronous)

    @cached_property
    def transfers_s(self) -> list[float]:
        """Seconds to send what crosses each cut one way, over the slowest link of the chain."""
        cluster, down = self.problem.cluster, self.chain.runs.down
        links = list(pairwise(self.devices))
        slowest = max((1 / cluster.bandwidth(*link) for link in links), default=0.0)
        latency_s = max((cluster.latency(*link) for link in links), default=0.0)
        sizes = at(down, self.micro_batch_size).tolist()
        return [latency_s + size * slowest if size > 0 else 0.0 for size in sizes]

    def busy_s(self, stage: int, lo: int, hi: int) -> float:
        """Forward and backward of a micro-batch on a stage's accelerator."""
        return (self.prefix_s[hi] - self.prefix_s[lo]) / self.speeds[stage]

    def needed_bytes(self, stages: int, stage: int, lo: int, hi: int) -> float:
        """Peak memory of a stage (`penstock.plan.cost.device_memory_bytes`)."""
        return needed_bytes(self.costs, stage, lo, hi, self.depth(stages, stage), self.recompute)

    @cached_property
    def costs(self) -> Costs:
        """What layers cost on each accelerator, which is a group and a kind of its own."""
        rows = [(self.micro_batch_size,)] * len(self.devices)
        return self.chain.costs([(device,) for device in self.devices], rows)

    def depth(self, stages: int, stage: int) -> int:
        """Micro-batches in flight, for BaPipe's own schedules by its table."""
        if self.schedule == self.method:
            kept = features_kept(self.method, stage=stage, stages=stages)
            return min(kept, self.micro_batches)
        return depth_function(self.schedule)(stages - stage, self.micro_batches)

    def cuts(self) -> tuple[int, ...]:
        """Balanced, coarse where a link is slow, tuned to memory; empty where nothing fits."""
        layers = len(self.layers_s)
        cuts = inter_layer_cuts(self.layers_s, self.speeds, range(1, layers))
        if not self.transfers_keep_up(cuts):
            coarse = coarse_cuts(self.transfers_s, self.bottleneck_s(cuts))
            cuts = inter_layer_cuts(self.layers_s, self.speeds, coarse)
        stages = len(cuts) - 1
        devices = self.problem.cluster.devices
        return memory_fine_tuned(
            cuts,
            [devices[device].memory_bytes for device in self.devices[:stages]],
            lambda stage, lo, hi: self.needed_bytes(stages, stage, lo, hi),
            self.busy_s,
        )

    def transfers_keep_up(self, cuts: tuple[int, ...]) -> bool:
        """Whether no boundary takes longer to cross than a stage computes."""
        return all(self.transfers_s[cut] <= self.bottleneck_s(cuts) for cut in cuts[1:-1])

    def bottleneck_s(self, cuts: tuple[int, ...]) -> float:
        """The slowest stage."""
        return max(self.busy_s(s, lo, hi) for s, (lo, hi) in enumerate(pairwise(cuts)))

    def estimate_s(self, cuts: tuple[int, ...]) -> float:
        """BaPipe's mini-batch time of these cuts; on FPGAs with border layers split between stages.

        Where a link is slower than computing, it sets the pace (`pace_s`).
        """
        stages = len(cuts) - 1
        is_fpga = is_asynchronous(self.problem.cluster)
        busy_s = self.split_bottleneck_s(stages) if is_fpga else self.bottleneck_s(cuts)
        transfer_s = max(self.transfers_s[cut] for cut in cuts[1:-1]) if stages > 1 else 0.0
        forward_s = busy_s * self.forward_part
        pace = pace_s(
            self.method,
            forward_s=forward_s,
            backward_s=busy_s - forward_s,
            transfer_s=transfer_s,
        )
        return mini_batch_s(
            self.method,
            micro_batches=self.micro_batches,
            stages=stages,
            busy_s=pace,
            transfer_s=transfer_s,
        )

    @cached_property
    def forward_part(self) -> float:
        """The forwards' part of all computing."""
        layers = range(len(self.layers_s))
        forward_s = self.problem.profile.forward_s(layers, self.micro_batch_size)
        return min(1.0, forward_s / self.prefix_s[-1]) if self.prefix_s[-1] > 0 else 0.0

    def split_bottleneck_s(self, stages: int) -> float:
        """The slowest stage where layers on the borders are split (intra-layer partition)."""
        speeds = self.speeds[:stages]
        shares = intra_layer_shares(self.layers_s, speeds)
        return max(
            sum(self.layers_s[share.layer] * share.fraction for share in stage) / speed
            for stage, speed in zip(shares, speeds, strict=True)
        )

    def plan(self, cuts: tuple[int, ...]) -> Plan:
        """The plan with these cuts."""
        return Plan(
            stages=tuple(
                Stage(range(lo, hi), (device,), (self.micro_batch_size,), self.recompute)
                for (lo, hi), device in zip(pairwise(cuts), self.devices, strict=False)
            ),
            micro_batches=self.micro_batches,
            micro_batch_size=self.micro_batch_size,
            schedule=self.schedule,
        )
