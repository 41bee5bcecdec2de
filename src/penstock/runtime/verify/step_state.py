"""Initial state of a training step besides weights: the user's module must begin with it, too."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from penstock.capture.forward.restored import kept_attributes
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.model_state import StatePlace, place_of_state, put_value, value_at
from penstock.runtime.engine import Engine
from penstock.runtime.verify.own_module import in_double
from penstock.torch_internals import pytree

SENT = frozenset([int, float, bool, str, bytes, type(None), torch.Tensor])
"""Types of values that can be sent, also in lists, tuples and dicts."""


@dataclass(frozen=True)
class StepState:
    """Initial state of a step: ``tensors`` of this rank, and ``attributes`` of the whole model.

    ``put_back`` restores the attributes of this rank.
    """

    tensors: Mapping[str, torch.Tensor]
    attributes: Mapping[StatePlace, Any]
    put_back: Callable[[], None]


def begin_of(engine: Engine) -> StepState:
    """Copies of all that forward changes, as it is now; all ranks must call this.

    An attribute has the value that it has on the last stage which runs the line that changes it.
    One that cannot be sent, as an object of the user's, has that of this rank.
    """
    graph = engine.graph
    attributes: dict[StatePlace, Any] = {}
    own: dict[tuple[str, ...], tuple[int, Any]] = {}
    for unit, place in graph.changed_attributes:
        attributes[place] = with_tensors(value_at(place_of_state(graph.program, place)), copy_of)
        for number, program in sorted(engine.stages.programs.items()):
            stage = program.module.stage
            value = graph.state.value_of(stage.state.key, place)
            leaves = pytree.tree_leaves(value, is_leaf=is_leaf)
            if (not unit or unit in stage.task.part.paths) and {*map(type, leaves)} <= SENT:
                own[tuple(place)] = number, with_tensors(value, copy_of)
    of_ranks = engine.world.all_gather(own) if attributes else []
    every = [(stage, StatePlace(*at), value) for o in of_ranks for at, (stage, value) in o.items()]
    attributes |= {place: value for _, place, value in sorted(every, key=itemgetter(0))}
    tensors = {n: copy_of(tensor) for n, tensor in engine.held.changed_by_forward().items()}
    return StepState(tensors, attributes, graph.state_snapshot())


@contextmanager
def with_attributes(
    graph: LayerGraph, begin: StepState, device: torch.device, *, double: bool
) -> Iterator[None]:
    """Hold the attributes that a step begins with in the user's module, on a device.

    With ``double`` their tensors are in float64.
    """

    def here(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.to(device, copy=True)
        return in_double(own) if double else own

    with kept_attributes(graph.own_module()):
        for place, value in begin.attributes.items():
            put_value(place_of_state(graph.program, place), with_tensors(value, here))
        yield


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def is_leaf(value: Any) -> bool:
    return type(value) not in (list, tuple, dict)


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A piece of state in which ``change`` was made to each tensor."""

    def changed(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(changed, value, is_leaf=is_leaf)
