"""Synchronised BatchNorm: statistics of the whole micro-batch over all replicas of a stage.

Computes mean and variance of a micro-batch whose rows are on several ranks, and the backward
through them. So results are those of one device that runs the same micro-batches. Statistics of the
parts are combined as in Chan, Golub and LeVeque, 1979.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from penstock.capture.forward.stage_module import StageModule, StageProgram
from penstock.capture.record.torch_calls import BATCH_NORM_OPERATORS, TorchCalls
from penstock.plan.plan import Plan
from penstock.runtime.processes.world import Groups, World
from penstock.runtime.program import Place
from penstock.torch_internals import BatchNorm


class SynchronisedBatchNorm(TorchCalls):
    """Batch normalisation in training by statistics of all replicas, while active.

    This rank is number ``replica`` of ``ranks``, whose group is in ``groups`` until it ends. With
    ``counting`` false this rank's rows are borrowed: it takes part but does not contribute.
    """

    def __init__(self, groups: Groups, ranks: tuple[int, ...], replica: int) -> None:
        super().__init__()
        self._groups, self._ranks = groups, ranks
        self._replica = replica
        self._counting = True

    def counting(self, rows: int) -> "SynchronisedBatchNorm":
        """The mode for a forward on ``rows`` of this rank's own rows."""
        self._counting = rows > 0
        return self

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace batch normalisations, and call everything else unchanged."""
        if func in BATCH_NORM_OPERATORS:
            if func is functional.batch_norm:
                call = BatchNormCall(*args, **kwargs)
            else:
                call = operator_call(*args, **kwargs)
            if call.training:
                return self._normalised(call)
        return func(*args, **kwargs)

    def _normalised(self, call: "BatchNormCall") -> torch.Tensor:
        x = call.input
        count = x.numel() // x.shape[1] if self._counting else 0
        with torch.no_grad():
            mean, variance, total = self._statistics(x, count)
            update_running(call, mean, variance, total)
        arguments = (mean, variance, total, count, call.eps, self)
        result = Normalise.apply(x, call.weight, call.bias, *arguments)
        assert isinstance(result, torch.Tensor)
        return result

    def _statistics(
        self, x: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean, biased variance and number of values of each channel over all replicas.

        The number stays on the device: the host would wait for it in every layer.
        """
        channels = x.shape[1]
        at_least_float = x.dtype if x.dtype.itemsize >= 4 else torch.float32
        table = x.new_zeros(len(self._ranks), 2 * channels + 1, dtype=at_least_float)
        if count:
            found = torch.batch_norm_update_stats(x.to(table.dtype), None, None, 0.0)
            torch.cat([*found, table.new_full((1,), count)], out=table[self._replica])
        self.sum_over_replicas(table)
        means, variances, counts = table.split([channels, channels, 1], dim=1)
        total = counts.sum()
        shares = counts.T / total
        mean = (shares @ means)[0]
        variance = (shares @ (means - mean).square_().add_(variances))[0]
        return mean, variance, total

    def sum_over_replicas(self, table: torch.Tensor) -> None:
        """Sum ``table`` over the replicas in place; all get the same bits."""
        # Not by `torch.distributed.all_reduce`, whose checks take as long as a small message.
        self._groups[self._ranks].allreduce([table]).wait()


@dataclass(frozen=True, slots=True)
class BatchNormCall:
    """The arguments of `torch.nn.functional.batch_norm`."""

    input: torch.Tensor
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


def operator_call(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> BatchNormCall:
    """The arguments of ``aten.batch_norm``, which has another order."""
    return BatchNormCall(input, running_mean, running_var, weight, bias, training, momentum, eps)


class Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` where mean and variance depend on x.

    With n values in a channel over all replicas, x^ the normalised values and g the incoming
    gradient times weight:

        dx = (g - sum(g) / n - x^ sum(g x^) / n) / sqrt(variance + eps)
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        total: torch.Tensor,
        count: int,
        eps: float,
        mode: SynchronisedBatchNorm,
    ) -> torch.Tensor:
        """Normalise this rank's rows."""
        ctx.save_for_backward(x, weight, mean, variance, total)
        ctx.count, ctx.eps, ctx.mode = count, eps, mode
        wide, scale, shift = (None if t is None else t.to(mean.dtype) for t in (x, weight, bias))
        assert wide is not None
        y, _, _ = torch.native_batch_norm(wide, scale, shift, mean, variance, False, 0.0, eps)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The gradients; sums over the replicas what flows back through the statistics."""
        x, weight, mean, variance, total = ctx.saved_tensors
        wide = x.to(mean.dtype)
        scale = (variance + ctx.eps).rsqrt_()
        weights = torch.ones_like(scale) if weight is None else weight.to(scale.dtype)
        factor = scale * weights
        # With constant statistics the gradient of x is factor * gradient.
        x_gradient, weight_gradient, bias_gradient = torch.ops.aten.native_batch_norm_backward(
            *(gradients[0].to(mean.dtype).contiguous(), wide, weights),
            *(mean, variance, None, None, False, ctx.eps, [True, True, True]),
        )
        sums = torch.stack([bias_gradient, weight_gradient])
        ctx.mode.sum_over_replicas(sums)
        if ctx.count:
            means = sums.mul_(factor / total)
            slope = means[1] * scale
            constant = means[0] - slope * mean
            x_gradient.sub_(along_channels(constant, x)).addcmul_(
                wide, along_channels(slope, x), value=-1
            )
        else:
            x_gradient.zero_()
        parameter_gradients = (
            (None, None)
            if weight is None
            else (weight_gradient.to(weight.dtype), bias_gradient.to(weight.dtype))
        )
        return (x_gradient.to(x.dtype), *parameter_gradients, None, None, None, None, None, None)


def update_running(
    call: BatchNormCall, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor
) -> None:
    """Update the running statistics as torch does, with the unbiased variance."""
    unbiased = variance * (total / (total - 1).clamp(min=1))
    for running, new in ((call.running_mean, mean), (call.running_var, unbiased)):
        if running is not None:
            # As `data`: autograd's version check ignores the write, like that of torch's kernel.
            now = new.to(running.dtype)
            running.data.mul_(1 - call.momentum).add_(now, alpha=call.momentum)


def along_channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One value for each channel, in a shape that broadcasts to ``x``."""
    return values.view(1, -1, *([1] * (x.dim() - 2)))


def uses_batch_norm(stage: StageModule) -> bool:
    """Return whether a stage normalises samples over the batch, by modules or by functions."""
    return stage.normalises or any(isinstance(part, BatchNorm) for part in stage.modules())


def groups_with_batch_norm(
    plan: Plan,
    world: World,
    places: Sequence[Place],
    every: Sequence[Mapping[int, StageProgram]],
) -> list[tuple[int, ...]]:
    """The device groups of several ranks whose stages normalise over the batch; on all ranks.

    ``every`` are this rank's stages for each path that batches may take.
    """
    groups = plan.device_groups
    if plan.tensor_groups or all(len(devices) == 1 for devices in groups):
        return []
    own = [
        place.group
        for place in places
        if any(uses_batch_norm(programs[place.stage].module) for programs in every)
    ]
    return [groups[group] for found in world.all_gather(own) for group in found]


class BatchNorms:
    """Synchronisation of the batch norms of this rank's stages, over their ``groups``."""

    def __init__(self, plan: Plan, groups: dict[tuple[int, ...], dist.ProcessGroup]) -> None:
        self._plan, self.groups = plan, groups

    def of(self, place: Place, program: StageProgram) -> SynchronisedBatchNorm | None:
        """That of a stage; None without any."""
        devices = self._plan.device_groups[place.group]
        if devices not in self.groups or not uses_batch_norm(program.module):
            return None
        return SynchronisedBatchNorm(self.groups, devices, place.replica)
