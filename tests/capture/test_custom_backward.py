"""Custom autograd Functions keep their own backward: loss and gradients of the plain module."""

from typing import Any

import pytest
import torch
from capture.three_layers import BATCH, Net, compare
from plain_training import in_pipeline
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import BadInput


class ReverseGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -ctx.factor * gradients[0], None


class RoundStraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class SetsUpApart(Function):
    """With ``setup_context``, a default argument, and nothing differentiable among two results."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any, power: int = 3) -> Any:
        return x**power, (x > 0).long(), x.abs()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.mark_non_differentiable(output[1], output[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 7 * ctx.saved_tensors[0] * gradients[0], None


class LinearTimesHalf(Function):
    """A linear layer whose weight gets half its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, options: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight) + options["rows"] * 0, None, options["label"]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, 0.5 * gradients[0].t() @ x, None


class TwoResults(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x + y, x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        first, second = gradients
        assert first is None
        return 2 * second, 3 * second


class CallsAnother(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return RoundStraightThrough.apply(x) * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ReverseGradient.apply(gradients[0], 0.25)


@torch.library.custom_op("penstock_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@triple.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


triple.register_autograd(lambda ctx, gradient: -gradient)

LOWEST: Any = Function.__mro__[1]


# Under a name of its own, as in most code.
reverse_gradient = ReverseGradient.apply


def with_parameter(net: Net, h: Any) -> Any:
    result, nothing, label = LinearTimesHalf.apply(
        h, net.middle.weight, {"rows": h.shape[0], "label": "x"}
    )  # pyright: ignore
    assert nothing is None
    assert label == "x"
    return result


def not_differentiable(net: Net, h: Any) -> Any:
    cube, positive, size = SetsUpApart.apply(h)  # pyright: ignore
    return cube + positive * size


def in_regions(net: Net, h: Any) -> Any:
    with torch.no_grad():
        still = reverse_gradient(h, 2.0)
    with torch.autocast("cpu", torch.bfloat16):
        low = RoundStraightThrough.apply(functional.linear(h.float(), net.middle.weight.float()))
        turned = reverse_gradient(h, 0.5)
    return h * still + low.double() + turned  # pyright: ignore


def checkpointed(reentrant: bool) -> Any:
    def between(net: Net, h: Any) -> Any:
        def run(x: Any) -> Any:
            return reverse_gradient(torch.tanh(net.middle(x)), 2.0)

        return torch.utils.checkpoint.checkpoint(run, h, use_reentrant=reentrant)

    return between


class WritesToItsInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0]


class LeavesTorch(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * torch.from_numpy(x.detach().numpy())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class CallsAModule(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, module: Any) -> Any:
        return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def penalty(net: Any, h: Any) -> Any:
    (gradient,) = torch.autograd.grad(reverse_gradient(h, 2.0).sum(), h, create_graph=True)
    return h + gradient


KEPT = {
    "gradient reversal": lambda net, h: reverse_gradient(h, 0.3),
    "rounding, straight through": lambda net, h: RoundStraightThrough.apply(3 * h),
    "with a parameter, a size and a dict": with_parameter,
    "two inputs and two results": lambda net, h: TwoResults.apply(h, torch.sin(h))[1],  # pyright: ignore
    "results without a gradient, setup_context": not_differentiable,
    "a Function that calls another": lambda net, h: CallsAnother.apply(h),
    "in regions without gradients and in low precision": in_regions,
    "in a checkpoint": checkpointed(False),
    "in a reentrant checkpoint": checkpointed(True),
    "that writes to its input": lambda net, h: WritesToItsInput.apply(h * 1),
    "that leaves torch": lambda net, h: LeavesTorch.apply(h),
    "that calls a module": lambda net, h: CallsAModule.apply(h, net.middle),
    "in vmap": lambda net, h: torch.vmap(lambda x: SetsUpApart.apply(x)[0])(h),  # pyright: ignore
    "in a gradient": penalty,
    "of a registered operator": lambda net, h: torch.ops.penstock_tests.triple(h),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_custom_function_keeps_its_backward(name: str) -> None:
    tolerance = 1e-2 if "low precision" in name else 1e-9
    compare(Net(KEPT[name]), tolerance=tolerance)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_it_does_in_other_schedules_and_where_activations_are_recomputed(schedule: str) -> None:
    compare(Net(with_parameter), schedule=schedule, recompute=schedule == "gpipe")


def test_functions_are_as_before_after_capture() -> None:
    before = vars(LOWEST).copy(), vars(Function).copy()
    capture_model(Net(KEPT["gradient reversal"]).double(), BATCH, loss=functional.cross_entropy)
    assert (vars(LOWEST), vars(Function)) == before


class Inject(Function):
    """Adds a gradient of its own, as routers do that balance their experts."""

    @staticmethod
    def forward(ctx: Any, carrier: Any, extra: Any) -> Any:
        ctx.shape = extra.shape
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], gradients[0].new_full(ctx.shape, 0.5)


def test_a_loss_that_is_injected_into_the_backward_is_refused_with_the_line() -> None:
    model = Net(lambda net, h: Inject.apply(h, h.square().mean())).double()
    graph = capture_model(model, BATCH, loss=functional.cross_entropy)
    module = graph.stage(range(len(graph.layer_names))).module
    with pytest.raises(BadInput, match=r"Inject at .*test_custom_backward\.py:\d+ gives gradients"):
        module(*graph.batch_leaves(BATCH))


class RunsAgain(Function):
    """Calls its module again in its backward, as the functions of reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Any, module: Any) -> Any:
        ctx.module = module
        ctx.save_for_backward(x)
        return x + module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.module(x).backward(gradients[0])
        return gradients[0] + x.grad, None


class Counted(nn.Linear):
    calls = 0

    def forward(self, input: Any) -> Any:
        """Counts its calls."""
        self.calls += 1
        return super().forward(input)


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(4, 8), Counted(8, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        hidden: Any = RunsAgain.apply(self.first(x), self.again)
        return self.last(torch.tanh(hidden) * 2)


def test_a_function_may_call_its_module_again_in_its_backward() -> None:
    compare(Reversible())


def test_the_check_of_the_first_run_is_no_call_of_the_forward() -> None:
    model = Reversible().double()
    graph = capture_model(model, BATCH, loss=functional.cross_entropy)
    front, back = graph.stage(range(2)), graph.stage(range(2, 4))
    sent = front.module(BATCH[0])
    assert model.again.calls == 1
    loss, _ = back.module(BATCH[1], *sent)
    assert torch.equal(loss, functional.cross_entropy(model(BATCH[0]), BATCH[1]))


class TimesScale(Function):
    """Reads what the forward has left in its module, and not what it was given."""

    @staticmethod
    def forward(ctx: Any, x: Any, module: Any) -> Any:
        ctx.module = module
        return x * module.scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.module.scale, None


class Scales(nn.Module):
    """Multiplies by a number of its samples, or of its calls, which its backward reads again."""

    scale: Any = 0

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def times_scale(self, x: Any) -> Any:
        return torch.sin(x) * self.scale

    def times_scale_here(self, gradient: Any) -> Any:
        return gradient * self.scale

    def times_calls(self, gradient: Any) -> Any:
        self.scale += 10
        return gradient * self.scale

    def forward(self, x: Any) -> Any:
        """Of what it is multiplied by, nothing is saved for the backward."""
        if self.way == "a hook that counts":
            self.scale += 1
            hooked = x * 1.0
            hooked.register_hook(self.times_calls)
            return hooked
        self.scale = x.detach().abs().mean() + 0.1
        if self.way == "a checkpoint":
            return torch.utils.checkpoint.checkpoint(self.times_scale, x, use_reentrant=False)
        if self.way == "a hook":
            hooked = x * 1.0
            hooked.register_hook(self.times_scale_here)
            return hooked
        return TimesScale.apply(x, self)


class InAUnit(Net):
    def __init__(self, way: str = "a function") -> None:
        super().__init__(lambda net, h: net.scales(h))
        self.scales = Scales(way)


def scaled_between(net: Any, h: Any) -> Any:
    net.scale = h.detach().abs().mean() + 0.1
    return TimesScale.apply(h, net)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "recompute"])
@pytest.mark.parametrize("model", [InAUnit, lambda: Net(scaled_between)])
def test_a_backward_finds_the_state_that_its_own_forward_left(model: Any, schedule: str) -> None:
    again = schedule == "recompute"
    options = {"schedule": "gpipe" if again else schedule, "recompute": again}
    compare(model(), micro_batches=3, per_micro_batch=True, **options)


@pytest.mark.parametrize("way", ["a hook", "a checkpoint"])
def test_hooks_and_checkpoints_find_the_state_of_their_forward(way: str) -> None:
    compare(InAUnit(way), micro_batches=3, per_micro_batch=True)


def test_what_a_backward_counts_is_counted_on_with_what_forwards_have_counted() -> None:
    model = InAUnit("a hook that counts").double()
    graph = capture_model(model, BATCH, loss=functional.cross_entropy)
    in_pipeline(model, graph, BATCH, micro_batches=3, schedule="gpipe")
    assert model.scales.scale == 3 * 11
