"""Gradients in flat buckets, summed over the ranks that hold the same parameters."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter, eq
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from penstock.capture.contract import ParameterUse
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.collectives import BUCKET_BYTES
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.clock import StepClock
from penstock.runtime.processes.world import Groups, World, await_work
from penstock.torch_internals import write_count

UNCOUNTED = set[torch.Tensor]()
"""Parameters whose gradients count no writes for now."""


@contextmanager
def uncounted(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Exclude additions to gradients from the count of writes: see `GradientBucket`."""
    own = [(parameter, parameter.grad) for parameter in parameters]
    UNCOUNTED.update(parameter for parameter, _ in own)
    for parameter, gradient in own:
        if gradient is not None:
            parameter.grad = gradient.data
    try:
        yield
    finally:
        UNCOUNTED.clear()
        for parameter, gradient in own:
            if gradient is not None:
                parameter.grad = gradient


class GradientSum(Protocol):
    """Sum of the gradients of a bucket over its holders, once in each iteration.

    What waits raises `Stalled` if a holder does not take part in time, and `RunFailed` if one
    failed or vanished.
    """

    def start(self) -> None:
        """Start the sum: this rank's gradients are complete. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until the bucket holds the sum."""
        ...

    def settle(self) -> None:
        """Wait until no other holder reads this rank's gradients any more."""
        ...

    def close(self) -> None:
        """Stop sharing the bucket's memory with other ranks."""
        ...


@dataclass(eq=False)
class GradientBucket:
    """Parameters of one element type that the same ranks hold for the same stages.

    ``flat`` holds their gradients, in a wider type than theirs if that is wished. ``narrowed``: its
    first half holds them in the parameters' own type, for a step. ``expected`` is the number of
    gradients that arrive in an iteration, one for each stage of this rank that uses a parameter;
    ``missing`` of them have not arrived yet. ``owner`` is the holder that counts the gradients in
    norms. With sharded optimizer state only the owner gets the sums, and ``values`` holds the
    parameters' values. ``sum`` adds ``summed`` over the holders if there are several. ``stage`` is
    the first stage of this rank that uses the parameters.

    A gradient to which nothing was added is none, as in torch: an optimizer leaves its parameter as
    it is, where one of zeros would decay it. ``summed`` is ``flat`` followed by ``arrived``: for
    each parameter, on how many holders a gradient has arrived. ``views`` are the gradients. Each
    counts the writes to it, not those to ``flat``, and had been written ``writes`` times at first.
    ``idle`` are the numbers of those that were not written since. ``divided``: the parameters are
    rows of some that other ranks hold the rest of.
    """

    holders: tuple[int, ...]
    stages: tuple[int, ...]
    owner: int
    parameters: list[nn.Parameter]
    summed: torch.Tensor
    stage: int
    values: torch.Tensor | None = None
    expected: int = 0
    missing: int = 0
    sum: GradientSum | None = None
    started_s: float = 0.0
    narrowed: bool = False
    divided: bool = False
    flat: torch.Tensor = field(init=False)
    arrived: torch.Tensor = field(init=False)
    views: list[torch.Tensor] = field(init=False)
    writes: list[int] = field(init=False)
    idle: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        place_gradients(self, self.summed)

    def restart(self) -> None:
        """Give all parameters a gradient, to which nothing was added."""
        self.narrowed = False
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view
        self.writes = [*map(write_count, self.views)]

    def count(self) -> None:
        """Find the parameters without a gradient on this rank, before the holders add them up."""
        unwritten = map(eq, map(write_count, self.views), self.writes)
        self.idle = [number for number, idle in enumerate(unwritten) if idle]
        self.arrived.fill_(1.0)
        for number in self.idle:
            self.arrived[number] = 0.0

    def drop_idle(self) -> None:
        """Leave parameters without a gradient that have none on any holder."""
        if self.idle:  # otherwise a device would be waited for
            found = self.arrived.tolist()
            for number in self.idle:
                if not found[number]:
                    self.parameters[number].grad = None

    def narrow(self) -> None:
        """Give a step gradients of the parameters' type, in a part of the memory of wider ones."""
        dtype = self.parameters[0].dtype
        if dtype != self.flat.dtype and not self.narrowed:
            self.narrowed = True
            found = self.gradients.copy_(self.flat.to(dtype))
            for parameter, view in views_into(found, self.parameters):
                if parameter.grad is not None:
                    parameter.grad = view

    def take_rebound(self) -> None:
        """Take values that the user's loop has put elsewhere, by ``p.data = x``, into ``values``.

        On every holder, before its owner sends them.
        """
        assert self.values is not None
        first = self.values.data_ptr()
        own = range(first, first + self.values.nbytes)
        if all(p.data_ptr() in own or not p.numel() for p in self.parameters):
            return
        for parameter, view in views_into(self.values, self.parameters):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = view

    @property
    def gradients(self) -> torch.Tensor:
        """The flat gradients: ``flat``, or its part."""
        whole, dtype = self.flat, self.parameters[0].dtype
        return whole.view(dtype)[: len(whole)] if self.narrowed else whole

    def square(self, not_counted: Collection[torch.Tensor] = ()) -> torch.Tensor:
        """The sum of the squares of its gradients, in float64; without some parameters'."""
        parts = [self.flat]
        if not_counted:
            counted = [p.grad for p in self.parameters if p not in not_counted]
            parts = [gradient for gradient in counted if gradient is not None] or [self.flat[:0]]
        return torch.stack([square_sum(part) for part in parts]).sum()


def bucket_parts(
    parameters: Sequence[nn.Parameter], size_of: Callable[[nn.Parameter], float]
) -> Iterator[list[nn.Parameter]]:
    """Groups of parameters of one element type, each of about ``BUCKET_BYTES``."""
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        part: list[nn.Parameter] = []
        size = 0.0
        for parameter in (p for p in parameters if p.dtype == dtype):
            if part and size + size_of(parameter) > BUCKET_BYTES:
                yield part
                part, size = [], 0.0
            part.append(parameter)
            size += size_of(parameter)
        if part:
            yield part


def make_bucket(
    holders: tuple[int, ...],
    stages: tuple[int, ...],
    owner: int,
    parameters: list[nn.Parameter],
    stage: int,
) -> GradientBucket:
    """A bucket with new memory for its gradients."""
    total = sum(parameter.numel() for parameter in parameters) + len(parameters)
    summed = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
    return GradientBucket(holders, stages, owner, parameters, summed, stage)


def place_gradients(bucket: GradientBucket, summed: torch.Tensor) -> None:
    """Make ``summed`` the bucket's memory, and the gradients of its parameters parts of it."""
    bucket.summed, own = summed, bucket.parameters
    bucket.flat, bucket.arrived = summed[: -len(own)], summed[-len(own) :]
    # As `data`, each has a count of writes of its own.
    bucket.views = [view.data for _, view in views_into(bucket.flat, own)]
    bucket.restart()


def flat_values(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Flat memory for the values of ``parameters``, which become views into it.

    A broadcast then needs no copy.
    """
    total = sum(parameter.numel() for parameter in parameters)
    flat = parameters[0].new_empty(total, requires_grad=False)
    for parameter, view in views_into(flat, parameters):
        view.copy_(parameter.detach())
        parameter.data = view
    return flat


def views_into(
    flat: torch.Tensor, parameters: Sequence[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter with its part of ``flat``, in its shape."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    return ((p, part.view(p.shape)) for p, part in zip(parameters, parts, strict=True))


ROW = 1 << 14
"""Numbers that are squared and added in their own type; the sums of rows are added in float64."""


def square_sum(numbers: torch.Tensor) -> torch.Tensor:
    """The sum of squares, in float64, without a copy.

    A CPU adds the numbers one after another: in float32 the norm of 20 million is 0.1 % too small.
    """
    flat, kind = numbers.flatten(), sum_dtype(numbers.dtype)
    whole = len(flat) // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=kind)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=kind)
    return rows.double().square().sum() + rest.double().square()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The floating-point type for sums of many numbers of ``dtype``: at least 32 bits."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def holders_of_parameters(
    graph: LayerGraph, plan: Plan, place: int = 0
) -> dict[str, tuple[int, ...]]:
    """The ranks that hold each parameter, by its first name (replicas and tied stages).

    Of tensor groups they are the ranks at ``place`` in each group, which hold equal shards.
    """
    holders: dict[str, tuple[int, ...]] = {}
    for name, stages in stages_of_parameters(graph, plan).items():
        devices = dict.fromkeys(device for stage in stages for device in plan.devices_of(stage))
        holders[name] = tuple(
            rank for device in devices for rank in plan.ranks_of(device)[place : place + 1]
        )
    return holders


def stages_of_parameters(graph: LayerGraph, plan: Plan) -> dict[str, tuple[int, ...]]:
    """The stages that use each parameter, by its first name."""
    return {
        use.name: tuple(sorted({plan.stage_of_layer(layer) for layer in use.layers}))
        for use in graph.parameter_uses
    }


def owners_of_parameters(
    uses: Iterable[ParameterUse], holders: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """The rank that keeps the optimizer state of each trained parameter, by its first name.

    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC
    2020, section 5.1: each rank keeps the optimizer state of a part of the parameters, gets the
    summed gradients of that part only, steps it, and sends the new values to the others. That sends
    as many bytes as the all-reduce that it replaces. Here a part consists of whole parameters, so
    that optimizers that need whole matrices work as well, balanced by bytes over all holders of a
    parameter: replicas, tied stages, and mirrored copies.

    Parameters with a single holder are assigned first. The others follow, largest first; each goes
    to the holder with the fewest bytes so far. Every rank gets the same result.

    >>> uses = [ParameterUse(name, (0,), size, True) for name, size in [("a", 6), ("b", 5)]]
    >>> uses += [ParameterUse("c", (1,), 4, True), ParameterUse("d", (1,), 2, True)]
    >>> both = {"a": (0, 1), "b": (0, 1), "c": (0, 1), "d": (1,)}
    >>> owners_of_parameters(uses, both)
    {'d': 1, 'a': 0, 'b': 1, 'c': 0}
    """
    trained = [use for use in uses if use.requires_grad and not use.is_buffer]
    loads: dict[int, int] = {}
    owners: dict[str, int] = {}
    for use in sorted(trained, key=lambda use: (len(holders[use.name]) > 1, -use.bytes, use.name)):
        owner = min(holders[use.name], key=lambda rank: loads.get(rank, 0))
        owners[use.name] = owner
        loads[owner] = loads.get(owner, 0) + use.bytes
    return owners


def make_groups(
    world: World, holder_sets: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """One process group for each distinct set of several ranks that contains this rank.

    All ranks create all groups, in the same order, so that none waits for another.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted({ranks for ranks in holder_sets if len(ranks) > 1}):
        group = world.new_group(ranks)
        if group is not None and world.rank in ranks:
            groups[ranks] = group
    return groups


class GradientBuckets:
    """The gradients of all stages of this rank.

    ``parameters[stage]`` are the parameters that a stage of this rank uses. They are divided into
    buckets of ``BUCKET_BYTES`` in reverse order, as the backward produces their gradients. During
    the last backward of a stage each bucket's all-reduce starts when its gradients are complete. So
    it overlaps the drain of the pipeline, if it ``starts_early``. Buckets start in a fixed order,
    the same on all ranks (later stages first, since they finish first). Gradients are summed, not
    averaged: the seeds of the loss contain the weights.

    Where optimizer state is divided, ``owners`` gives the rank that steps a parameter. Gradients
    are then summed on that rank only, and `share_values` sends the updated values to the others.
    ``size_of`` gives the bytes of a parameter by which buckets are divided. ``not_counted`` are
    parameters whose gradients another rank of the tensor group counts in norms.
    """

    def __init__(
        self,
        world: World,
        parameters: Mapping[int, Mapping[str, nn.Parameter]],
        stages: Mapping[str, tuple[int, ...]],
        holders: Mapping[str, tuple[int, ...]],
        groups: Groups,
        clock: StepClock,
        owners: Mapping[str, int] | None = None,
        size_of: Callable[[nn.Parameter], float] = attrgetter("nbytes"),
    ) -> None:
        self.not_counted: frozenset[torch.Tensor] = frozenset()
        self._sharing: dist.ProcessGroup | None = None
        self._world = world
        self._groups = groups
        self._clock = clock
        self._used = {stage: set(own.values()) for stage, own in parameters.items()}
        self.buckets: list[GradientBucket] = []
        every = {name: p for own in parameters.values() for name, p in own.items()}
        self._names = {id(parameter): name for name, parameter in every.items()}
        sharded = owners or {}
        kinds: dict[tuple[tuple[int, ...], tuple[int, ...], int, bool], list[nn.Parameter]] = {}
        for name, parameter in every.items():
            owner = sharded.get(name, holders[name][0])
            kind = (holders[name], stages[name], owner, name in sharded)
            kinds.setdefault(kind, []).append(parameter)
        for kind, own in sorted(kinds.items(), key=lambda item: (-item[0][1][0], item[0])):
            for part in bucket_parts(own[::-1], size_of):
                stage = next(stage for stage in kind[1] if stage in self._used)
                bucket = make_bucket(*kind[:3], part, stage)
                bucket.expected = sum(p in used for used in self._used.values() for p in part)
                if bucket.holders in groups:
                    bucket.sum = GroupSum(bucket, groups, world)
                    if kind[3]:
                        bucket.values = flat_values(part)
                self.buckets.append(bucket)
        self.shared = [bucket for bucket in self.buckets if bucket.sum is not None]
        self._launched = 0
        self.starts_early = world.backend != "nccl"

    def share(self, divided: Collection[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Mark the parameters that the ranks of a group divide: a gradient on one is one on all."""
        self._sharing = group
        for bucket in self.buckets:
            bucket.divided = bucket.parameters[0] in divided

    def sum_in(self, dtype: torch.dtype) -> None:
        """Sum the gradients of narrower parameters in ``dtype``; before any are shared."""
        for bucket in self.buckets:
            if bucket.flat.is_floating_point() and bucket.flat.dtype.itemsize < dtype.itemsize:
                for parameter in bucket.parameters:
                    parameter.grad = None
                    parameter.grad_dtype = None  # of any type
                place_gradients(bucket, bucket.summed.to(dtype))

    def zero(self, stage: int | None = None) -> None:
        """Start an iteration with all gradients zero, or those of one stage.

        Gradients that the user's loop has set to none, by ``zero_grad``, are in the bucket again.
        """
        self._launched = 0
        for bucket in self.buckets:
            if stage is None or bucket.stage == stage:
                bucket.flat.zero_()
                bucket.restart()
                bucket.missing = bucket.expected

    @contextmanager
    def launching(self, stage: int) -> Iterator[None]:
        """Start each all-reduce in a stage's last backward when its gradients are complete."""
        handles = []
        waiting = set(self._used[stage])
        for bucket in self.shared:

            def arrived(parameter: torch.Tensor, bucket: GradientBucket = bucket) -> None:
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
        # Parameters that got their gradients in an earlier half backward, or get none.
        for bucket in self.shared:
            bucket.missing -= sum(parameter in waiting for parameter in bucket.parameters)
        self._launch_complete()

    def finish(self, stage: int | None = None, *, sums: bool = True) -> None:
        """Start the remaining sums and wait for all. Gradients may be changed afterwards.

        Parameters of ``stage``, or of all, to which no micro-batch has given a gradient have none
        then; with ``sums``, if none has on any holder.
        """
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                gradient = parameter.grad
                if gradient is not None and gradient.dtype != bucket.flat.dtype:
                    raise BadInput(
                        f"forward turns '{self._names[id(parameter)]}' from {bucket.flat.dtype} "
                        f"into {gradient.dtype}, as module.to(dtype) does, and its gradient would "
                        f"not count as others do; turn it before the pipeline is made"
                    )
        shared = self.shared if sums else ()
        for bucket in shared:
            bucket.missing = 0
        self._launch(len(shared))
        for bucket in shared:
            if bucket.sum is not None:
                bucket.sum.wait()
                self._record(bucket)
        for bucket in shared:
            if bucket.sum is not None:
                bucket.sum.settle()
        ended = [b for b in self.buckets if stage is None or b.stage == stage]
        for bucket in ended:
            if not sums or bucket.sum is None:
                bucket.count()
        self._count_shares()
        for bucket in ended:
            if not sums or self._steps(bucket):
                bucket.drop_idle()

    def _count_shares(self) -> None:
        """Add up where gradients have arrived over the ranks that divide their parameters."""
        divided = [bucket for bucket in self.buckets if bucket.divided]
        if divided:
            found = torch.cat([bucket.arrived for bucket in divided])
            work = dist.all_reduce(found, group=self._sharing, async_op=True)
            assert work is not None  # because of async_op
            await_work(work, self._world, "which gradients have arrived")
            sizes = [len(bucket.arrived) for bucket in divided]
            for bucket, own in zip(divided, found.split(sizes), strict=True):
                bucket.arrived.copy_(own)

    def _steps(self, bucket: GradientBucket) -> bool:
        """Return whether this rank has the bucket's sum, and steps its parameters."""
        return bucket.values is None or bucket.owner == self._world.rank

    def scale(self, factor: float) -> None:
        """Multiply all gradients whose sums this rank has."""
        if factor != 1.0:
            for bucket in self.buckets:
                if self._steps(bucket):
                    bucket.flat.mul_(factor)

    def narrow(self) -> None:
        """Give the gradients that this rank steps the parameters' type, until they are zeroed."""
        for bucket in self.buckets:
            if self._steps(bucket):
                bucket.narrow()

    def square_sum(self, *, summed: bool = True) -> torch.Tensor | float:
        """The sum of squares of the gradients that this rank owns; of all, unless ``summed``."""
        rank = self._world.rank
        own = [bucket for bucket in self.buckets if not summed or bucket.owner == rank]
        squares = [bucket.square(self.not_counted) for bucket in own]
        return torch.stack(squares).sum() if own else 0.0

    def share_values(self) -> None:
        """Broadcast the parameters that this rank has stepped, if optimizer state is sharded."""
        handed: list[tuple[GradientBucket, dist.Work]] = []
        for bucket in self.shared:
            if bucket.values is not None:
                bucket.take_rebound()
                bucket.started_s = self._clock.now()
                group = self._groups[bucket.holders]
                work = dist.broadcast(bucket.values, bucket.owner, group=group, async_op=True)
                assert work is not None  # because of async_op
                handed.append((bucket, work))
        for bucket, work in handed:
            await_bucket(work, bucket, self._world, "the new parameters")
            self._record(bucket)

    def close(self) -> None:
        """Stop summing and release shared memory."""
        for bucket in self.shared:
            if bucket.sum is not None:
                bucket.sum.close()

    def _launch_complete(self) -> None:
        self._launch(len(self.shared) if self.starts_early else 0)

    def _launch(self, count: int) -> None:
        """Start the sums of complete buckets, of the first ``count``."""
        while self._launched < count and not self.shared[self._launched].missing:
            bucket = self.shared[self._launched]
            self._launched += 1
            bucket.started_s = self._clock.now()
            if bucket.sum is not None:
                bucket.count()
                bucket.sum.start()

    def _record(self, bucket: GradientBucket) -> None:
        start_s, end_s = bucket.started_s, self._clock.now()
        self._clock.add("REDUCE", bucket.stage, -1, start_s, end_s, -1, bucket.flat.nbytes)


class GroupSum:
    """An all-reduce of one bucket, or a reduce to its owner; see `GradientSum`.

    The group of the holders is in ``groups`` until it is destroyed.
    """

    def __init__(self, bucket: GradientBucket, groups: Groups, world: World) -> None:
        self._bucket, self._groups, self._world = bucket, groups, world
        self._work: dist.Work | None = None

    def start(self) -> None:
        bucket, group = self._bucket, self._groups[self._bucket.holders]
        # Gloo cannot reduce CUDA tensors to one rank, so all ranks get the sum.
        to_all = bucket.summed.is_cuda and self._world.backend == "gloo"
        if bucket.values is None or to_all:
            self._work = dist.all_reduce(bucket.summed, group=group, async_op=True)
        else:
            self._work = dist.reduce(bucket.summed, bucket.owner, group=group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            await_bucket(self._work, self._bucket, self._world, "the gradient sum")
            self._work = None

    def settle(self) -> None:
        """Nothing to wait for: other ranks have copies."""

    def close(self) -> None:
        """Nothing to do: the memory is not shared."""


def await_bucket(work: dist.Work, bucket: GradientBucket, world: World, of: str) -> None:
    """Wait for an operation on ``bucket`` among its holders; ``of`` names it in error messages."""
    ranks = ", ".join(str(rank) for rank in bucket.holders if rank != world.rank)
    await_work(work, world, f"{of} of stage {bucket.stage} with rank {ranks}")
