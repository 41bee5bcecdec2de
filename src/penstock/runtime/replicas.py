"""Gradients in flat buckets, summed over the ranks that hold the same parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.collectives import BUCKET_BYTES
from penstock.errors import RunFailed, Stalled
from penstock.plan.plan import Plan
from penstock.runtime.clock import Clock
from penstock.runtime.sharding import flat_parameters
from penstock.runtime.world import World

__all__ = [
    "GradientBuckets",
    "holders_of_parameters",
    "make_groups",
    "stages_of_parameters",
]


def holders_of_parameters(graph: LayerGraph, plan: Plan) -> dict[str, tuple[int, ...]]:
    """For each parameter, by its first name, the ranks that hold it: replicas and tied stages."""
    holders: dict[str, tuple[int, ...]] = {}
    for use in graph.parameter_uses:
        stages = sorted({plan.stage_of_layer(layer) for layer in use.layers})
        holders[use.name] = tuple(
            dict.fromkeys(device for stage in stages for device in plan.devices_of(stage))
        )
    return holders


def stages_of_parameters(graph: LayerGraph, plan: Plan) -> dict[str, tuple[int, ...]]:
    """For each parameter, by its first name, the stages that use it."""
    return {
        use.name: tuple(sorted({plan.stage_of_layer(layer) for layer in use.layers}))
        for use in graph.parameter_uses
    }


def make_groups(
    world: World, holder_sets: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """One process group for each distinct set of several ranks that this rank is in.

    All ranks create all groups, in the order of the sets, so that none waits for another.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted({ranks for ranks in holder_sets if len(ranks) > 1}):
        group = world.new_group(ranks)
        if group is not None and world.rank in ranks:
            groups[ranks] = group
    return groups


@dataclass(eq=False)
class Bucket:
    """Parameters of one element type that the same ranks hold for the same stages.

    Their gradients lie in ``flat``. In an iteration ``expected`` gradients complete it, one from
    each stage of this rank that uses a parameter; ``missing`` of them are still to come. ``owner``
    is the holder whose gradients count. Where the optimizer's state is sharded it alone gets the
    sums, and the values of the parameters lie in ``values``.
    """

    holders: tuple[int, ...]
    stages: tuple[int, ...]
    owner: int
    parameters: list[nn.Parameter]
    flat: torch.Tensor
    values: torch.Tensor | None = None
    expected: int = 0
    missing: int = 0
    work: dist.Work | None = None
    started_s: float = 0.0


class GradientBuckets:
    """The gradients of this rank's parameters, of all its stages.

    ``parameters[stage]`` are those that a stage of this rank uses. They are taken in reverse, as
    the backward produces their gradients, and cut into buckets of ``BUCKET_BYTES``. During the last
    backward of a stage each bucket's all-reduce starts as soon as its gradients are complete, in
    the fixed order of the buckets (the same on all ranks: later stages first, as they end first),
    while the pipeline drains. Sums, not means: the loss seeds carry the weights.

    ``owners`` names the rank that steps each parameter where the optimizer's state is sharded: then
    gradients are summed there only, and `share_values` hands the stepped values to the others.
    ``before_sum``, if set, is called with each shared bucket just before its sum starts.
    """

    def __init__(
        self,
        world: World,
        parameters: Mapping[int, Mapping[str, nn.Parameter]],
        stages: Mapping[str, tuple[int, ...]],
        holders: Mapping[str, tuple[int, ...]],
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        clock: Clock,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        self.before_sum: Callable[[Bucket], None] | None = None
        self._world = world
        self._groups = groups
        self._clock = clock
        self._used = {stage: set(own.values()) for stage, own in parameters.items()}
        self.buckets: list[Bucket] = []
        every = {name: p for own in parameters.values() for name, p in own.items()}
        sharded = owners or {}
        kinds: dict[tuple[tuple[int, ...], tuple[int, ...], int], list[nn.Parameter]] = {}
        for name, parameter in every.items():
            kind = (holders[name], stages[name], sharded.get(name, holders[name][0]))
            kinds.setdefault(kind, []).append(parameter)
        for kind, own in sorted(kinds.items(), key=lambda item: (-item[0][1][0], item[0])):
            for part in bucket_parts(own[::-1]):
                bucket = make_bucket(*kind, part)
                bucket.expected = sum(p in used for used in self._used.values() for p in part)
                if sharded and bucket.holders in groups:
                    bucket.values = flat_parameters(part)
                self.buckets.append(bucket)
        self.shared = [bucket for bucket in self.buckets if bucket.holders in groups]
        self._launched = 0

    def zero(self) -> None:
        """Start an iteration: all gradients zero."""
        self._launched = 0
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.work = None
            bucket.missing = bucket.expected

    @contextmanager
    def launching(self, stage: int) -> Iterator[None]:
        """Around a stage's last backward: start each all-reduce when its gradients are in."""
        handles = []
        waiting = set(self._used[stage])
        for bucket in self.shared:

            def arrived(parameter: torch.Tensor, bucket: Bucket = bucket) -> None:
                waiting.discard(parameter)  # type: ignore[arg-type]
                bucket.missing -= 1
                if bucket.missing == 0:
                    self._launch_complete()

            for parameter in bucket.parameters:
                if parameter in self._used[stage]:
                    handles.append(parameter.register_post_accumulate_grad_hook(arrived))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        # Those that got their gradients in a first half before, or get none.
        for bucket in self.shared:
            bucket.missing -= sum(parameter in waiting for parameter in bucket.parameters)
        self._launch_complete()

    def finish(self) -> None:
        """Start what has not been started, and wait for all sums.

        Raises:
            Stalled: a holder did not take part in time.
            RunFailed: a holder vanished.
        """
        for bucket in self.shared:
            bucket.missing = 0
        self._launch_complete()
        for bucket in self.shared:
            self._wait(bucket)

    def scale(self, factor: float) -> None:
        """Multiply all gradients that this rank has the sums of."""
        if factor != 1.0:
            for bucket in self.buckets:
                if bucket.values is None or bucket.owner == self._world.rank:
                    bucket.flat.mul_(factor)

    def square_sum(self) -> float:
        """The sum of squares of the gradients that this rank counts: it is their owner."""
        norms = [
            torch.linalg.vector_norm(bucket.flat, dtype=wide(bucket.flat.dtype))
            for bucket in self.buckets
            if bucket.owner == self._world.rank
        ]
        if not norms:
            return 0.0
        return float(torch.stack([norm.double() for norm in norms]).square().sum())

    def share_values(self) -> None:
        """Hand on the parameters that this rank has stepped, where the others have not.

        Raises:
            Stalled: a holder did not take part in time.
            RunFailed: a holder vanished.
        """
        handed = [bucket for bucket in self.shared if bucket.values is not None]
        for bucket in handed:
            bucket.started_s = self._clock.now()
            group = self._groups[bucket.holders]
            assert bucket.values is not None
            bucket.work = dist.broadcast(bucket.values, bucket.owner, group=group, async_op=True)
        for bucket in handed:
            self._wait(bucket, "the new parameters")

    def _launch_complete(self) -> None:
        while self._launched < len(self.shared) and not self.shared[self._launched].missing:
            bucket = self.shared[self._launched]
            self._launched += 1
            if self.before_sum is not None:
                self.before_sum(bucket)
            bucket.started_s = self._clock.now()
            group = self._groups[bucket.holders]
            # Gloo has no reduction to one rank for tensors on a GPU; a sum on all is one as well.
            to_all = bucket.flat.is_cuda and self._world.backend == "gloo"
            if bucket.values is None or to_all:
                bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)
            else:
                bucket.work = dist.reduce(bucket.flat, bucket.owner, group=group, async_op=True)

    def _wait(self, bucket: Bucket, of: str = "the gradient sum") -> None:
        if bucket.work is None:
            return
        try:
            if self._world.backend == "nccl":
                bucket.work.wait()
            else:
                bucket.work.wait(timedelta(seconds=self._world.timeout_s))
        except RuntimeError as cause:
            ranks = ", ".join(str(rank) for rank in bucket.holders if rank != self._world.rank)
            what = f"{of} of stage {self._stage_of(bucket)} with rank {ranks}"
            if "imed out" in str(cause) or "imeout" in str(cause):
                limit = f"{self._world.timeout_s:g} s"
                raise Stalled(f"rank {self._world.rank} waited {limit} for {what}") from cause
            raise RunFailed(f"rank {self._world.rank} lost {what}") from cause
        bucket.work = None
        stage, end_s = self._stage_of(bucket), self._clock.now()
        self._clock.add("REDUCE", stage, -1, bucket.started_s, end_s, -1, bucket.flat.nbytes)

    def _stage_of(self, bucket: Bucket) -> int:
        """The first stage of this rank that uses the bucket's parameters."""
        return next(stage for stage in bucket.stages if stage in self._used)


def bucket_parts(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one element type, each about ``BUCKET_BYTES``."""
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        part: list[nn.Parameter] = []
        size = 0
        for parameter in (p for p in parameters if p.dtype == dtype):
            if part and size + parameter.nbytes > BUCKET_BYTES:
                yield part
                part, size = [], 0
            part.append(parameter)
            size += parameter.nbytes
        if part:
            yield part


def make_bucket(
    holders: tuple[int, ...], stages: tuple[int, ...], owner: int, parameters: list[nn.Parameter]
) -> Bucket:
    """Flat memory for the gradients of ``parameters``, which become views into it."""
    total = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        parameter.grad = flat[start:stop].view(parameter.shape)
        start = stop
    return Bucket(holders, stages, owner, parameters, flat)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to add up many numbers of ``dtype`` in."""
    return dtype if dtype.itemsize >= 4 else torch.float32
