"""The user's program: his model, his loss, and how a batch goes to them."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from penstock.capture.batch.call import BatchCall, WeightedLosses, loss_in_result
from penstock.capture.contract import LossFunction
from penstock.capture.record.absent import RUNS, Absent, absent_like
from penstock.capture.record.closures import CopiedFunctions
from penstock.capture.record.user_lines import line_of_user, line_with_source
from penstock.capture.tensor_parts import give_scales, is_quantised
from penstock.errors import BadInput, CaptureFailed
from penstock.torch_internals import InOneProcess, holder_of

LOSS = "loss"
"""Names of a loss module's tensors and modules start with this."""


def refuse_ranks(function: str, rank: int | None) -> NoReturn:
    """Raise `BadInput` for a function of `torch.distributed` that the user's program calls."""
    where = "" if rank is None else f" on rank {rank}"
    raise BadInput(
        f"torch.distributed.{function}() is called{where} at {line_with_source(line_of_user())}, "
        f"but forward and loss run as in one process, since ranks have different stages and the "
        f"loss is that of the whole batch; leave the call out, or make it only where "
        f"torch.distributed.is_initialized(), which is False there"
    )


IN_ONE_PROCESS = InOneProcess(refuse_ranks)
"""Context in which the user's program runs: it finds no other ranks."""


class Returned(NamedTuple):
    """Results of a program: the loss (None without), the model's output, and the loss's terms."""

    loss: Any
    output: Any
    terms: Sequence[torch.Tensor] = ()


class WholeModule(nn.Module):
    """``model`` and its loss as one module of the batch's leaves: ``forward(*leaves)``.

    It returns the loss, then its terms if the loss is a list. A loss function that is a module
    keeps its parameters, under ``loss.``.
    """

    def __init__(self, program: "UserProgram") -> None:
        super().__init__()
        self.model, self.loss = program.model, program.loss
        self._program = program

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The scalar loss of a batch with these leaves, and its terms."""
        returned = self._program.run(dict(enumerate(leaves)))
        return (returned.loss, *returned.terms)


@dataclass(frozen=True)
class UserProgram:
    """A model with its loss function, as one tree of modules, and the layout of its batches.

    Modules of the model have their own names; those of a loss that is a module start with ``loss``.
    """

    model: nn.Module
    loss: LossFunction | None
    call: BatchCall

    def check(self) -> None:
        """Raise `BadInput` if model and loss would share names."""
        if self._own_loss is not None and isinstance(getattr(self.model, LOSS, None), nn.Module):
            raise BadInput(
                f'{type(self.model).__name__} has a module named "loss" and a loss module was '
                "given, so their parameters would share names; rename the model's, or pass a "
                "function"
            )

    @property
    def _own_loss(self) -> nn.Module | None:
        """The loss, if it is a module that is no part of the model."""
        loss = self.loss
        if isinstance(loss, nn.Module) and all(part is not loss for part in self.model.modules()):
            return loss
        return None

    def run(
        self,
        leaves: Mapping[int, torch.Tensor],
        *,
        with_loss: bool = True,
        on_output: Callable[[], None] | None = None,
        instead: LossFunction | None = None,
    ) -> "Returned":
        """Run model and loss on a batch with these leaves; ``on_output`` is called between them.

        ``instead`` is called in the place of the loss function.
        """
        RUNS.append(self)
        try:
            with IN_ONE_PROCESS:
                output = self.call.call(self.model, leaves)
                if on_output is not None:
                    on_output()
                if not with_loss:
                    return Returned(None, output)
                if self.loss is None:
                    return Returned(loss_in_result(output, type(self.model).__name__), output)
                target = self.call.target(leaves)
                if isinstance(self.loss, WeightedLosses):
                    found = self.loss.terms(output, target)
                    terms = [
                        loss_in_result(term, f"term {n} of loss") for n, term in enumerate(found)
                    ]
                    return Returned(reduce(add, terms), output, terms)
                value = (instead or self.loss)(output, target)
                return Returned(loss_in_result(value, "the loss function"), output)
        finally:
            RUNS.pop()

    # The tree of modules.

    @property
    def _roots(self) -> dict[str, nn.Module]:
        """The outermost modules by their names."""
        loss = self._own_loss
        return {"": self.model} if loss is None else {"": self.model, LOSS: loss}

    def named_modules(self, *, each_once: bool = True) -> Iterator[tuple[str, nn.Module]]:
        """All modules with their names; ``each_once`` with the first, else with all of them."""
        for name, root in self._roots.items():
            yield from root.named_modules(None, name, each_once)

    def module(self, path: str) -> nn.Module:
        """The module with this name."""
        if path.partition(".")[0] == LOSS and (loss := self._own_loss) is not None:
            return loss.get_submodule(path.removeprefix(LOSS).removeprefix("."))
        try:
            return self.model.get_submodule(path)
        except AttributeError as error:
            raise BadInput(
                f"{type(self.model).__name__} has no module '{path}' any more, which it had when "
                f"it was captured; capture it again"
            ) from error

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, under all their names."""
        for name, root in self._roots.items():
            yield from root.named_parameters(name, remove_duplicate=False)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All buffers, under all their names."""
        for name, root in self._roots.items():
            yield from root.named_buffers(name, remove_duplicate=False)

    @property
    def loss_state(self) -> dict[str, Any]:
        """State that a loss that is a module would save, by its names here."""
        loss = self._own_loss
        return {} if loss is None else loss.state_dict(prefix=f"{LOSS}.")

    def places(self, name: str) -> tuple[dict[str, Any], str]:
        """The dict that holds a parameter or buffer, and its key there."""
        path, _, last = name.rpartition(".")
        module = self.module(path)
        if last not in holder_of(module, last):
            raise BadInput(
                f"{type(self.model).__name__} has no '{name}' any more, which it had when it was "
                f"captured, as where pruning or a parametrization begins, or ends: close the "
                f"pipeline, with gather=True, and capture the changed model"
            )
        return holder_of(module, last), last

    @property
    def root_names(self) -> tuple[str, ...]:
        """The names of the outermost modules, which are never left out."""
        return tuple(self._roots)

    def without_values(self, *, keeps_parameters: bool) -> "UserProgram":
        """A copy to record on: parameters (and buffers on meta) are absent, or have their values.

        Python state and buffers with values are copied, so that the user's stay as they are. All
        parameters require gradients, so that the record shows what would, whatever is frozen.
        """
        memo: dict[int, Any] = {}
        for _, tensor in (*self.named_parameters(), *self.named_buffers()):
            is_parameter = isinstance(tensor, nn.Parameter)
            if type(tensor) is Absent:
                continue
            trains = is_parameter and (tensor.is_floating_point() or tensor.is_complex())
            if is_parameter and not trains and is_quantised(tensor) and not tensor.is_meta:
                # A quantised weight, with all that its class keeps beside it.
                memo[id(tensor)] = tensor
            elif is_parameter and keeps_parameters and not tensor.is_meta:
                memo[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=trains)
            elif is_parameter or tensor.is_meta:
                shape = tuple(tensor.shape)
                found = absent_like(shape, tensor.dtype, trains, is_parameter=is_parameter)
                memo[id(tensor)] = give_scales(
                    found, tensor, lambda _, t: absent_like(t.shape, t.dtype)
                )
        for _, module in self.named_modules():
            for value in module.__dict__.values():  # what forward has left, as weight norms do
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    memo[id(value)] = value.detach().clone()
        try:
            model, loss = copy.deepcopy((self.model, self.loss), memo)
        except Exception as error:
            raise CaptureFailed(
                f"{type(self.model).__name__} cannot be copied, and a copy is what the example "
                f"batch runs on: {type(error).__name__}: {str(error).partition(chr(10))[0]}; give "
                f"the class that cannot be copied a __deepcopy__ method"
            ) from error
        functions = CopiedFunctions(memo)
        for own in (model, loss):
            if isinstance(own, nn.Module):
                functions.put_into(own)
        return UserProgram(model, functions.of(loss), self.call)

    @cached_property
    def configs(self) -> tuple[Any, ...]:
        """The configurations of Hugging Face models that say whether keys and values are kept."""
        every = (getattr(module, "config", None) for _, module in self.named_modules())
        found = {id(config): config for config in every if hasattr(config, "use_cache")}
        return tuple(found.values())

    @contextmanager
    def without_caches(self) -> Iterator[None]:
        """Keep Hugging Face models from caching keys and values, which training does not use."""
        configs = [config for config in self.configs if config.use_cache]
        for config in configs:
            config.use_cache = False
        try:
            yield
        finally:
            for config in configs:
                config.use_cache = True

    @cached_property
    def tensors(self) -> "ProgramTensors":
        """Parameters and buffers by their first names."""
        found, first_names = ProgramTensors(), dict[int, str]()
        for named, held in (
            (self.named_parameters(), found.parameters),
            (self.named_buffers(), found.buffers),
        ):
            for name, tensor in named:
                first = first_names.setdefault(id(tensor), name)
                if first == name:
                    held[name] = tensor  # pyright: ignore[reportArgumentType]
                else:
                    found.tied[name] = first
        return found


@dataclass(frozen=True)
class ProgramTensors:
    """Parameters and buffers by first name, and the other names of those that have several."""

    parameters: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])
    buffers: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    tied: dict[str, str] = field(default_factory=dict[str, str])
