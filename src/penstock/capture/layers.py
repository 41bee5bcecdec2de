"""Groups work into layers, by the modules that it was called from.

A block is an entry of a ModuleList or Sequential. At granularity "module" a unit is a child of a
block (``h.3.attn``, ``h.3.mlp``) or a module outside any block (``lm_head``). Only units with heavy
operators (products, convolutions, look-ups) become layers. Between the last heavy operator of one
unit and the first of the next, the cut is where the fewest bytes cross:

    addmm(c_proj)   dropout   add    layer_norm   addmm(c_fc)
                  2         2 tensors          2          cut after add: 1 tensor
                                   ^
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx, nn

from penstock.capture.cleaning import WRAPPED_LOSS, WRAPPED_MODEL
from penstock.capture.cut import distinct
from penstock.capture.dataflow import Dataflow
from penstock.capture.operators import is_heavy, is_loss, packet_name, tensor_value, traced_bytes
from penstock.capture.tensor_specs import TensorFacts

__all__ = ["Layers", "UnitOf", "find_layers", "unit_function"]

UnitOf = Callable[[fx.Node], str]
"""The unit of a work node."""

LOSS = "loss"
_COST_OF_UNORDERED_ROWS = 1 << 60


@dataclass(frozen=True)
class Layers:
    """Distinct names, and the position in the order of work at which each layer starts."""

    names: tuple[str, ...]
    starts: tuple[int, ...]


def module_path(node: fx.Node) -> str:
    """The dotted path, in the user's model, of the innermost module that called the node.

    It is ``loss`` or below for the loss function, and "" for the model's own forward.
    """
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if not path.startswith("_empty")]
    path = paths[-1].split("@")[0] if paths else ""
    if path == "model":
        return ""
    if path.startswith(WRAPPED_MODEL):
        return path.removeprefix(WRAPPED_MODEL)
    return LOSS if path == "" or path.startswith(WRAPPED_LOSS) or path == LOSS else path


def unit_function(model: nn.Module, granularity: str) -> UnitOf:
    """The unit of each node at ``granularity``."""
    containers = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    }

    def blocks(parts: Sequence[str]) -> list[int]:
        """The lengths of the prefixes of a path that are entries of a container."""
        return [k + 1 for k in range(len(parts)) if ".".join(parts[:k]) in containers]

    def unit(node: fx.Node) -> str:
        path = module_path(node)
        parts = path.split(".") if path else []
        found = blocks(parts)
        if granularity == "operator":
            return node.name if not path else f"{path}.{node.name}"
        if not found:
            return path
        return ".".join(parts[: found[0] if granularity == "block" else found[-1] + 1])

    return unit


def find_layers(flow: Dataflow, facts: TensorFacts, unit_of: UnitOf, granularity: str) -> Layers:
    """The layers of the work of ``flow``."""
    units = _units(flow, unit_of, granularity)
    costs = _cut_costs(flow, facts)
    starts, names = [0], [units[0].name]
    for before, unit in pairwise(units):
        candidates = [c for c in range(before.last + 1, unit.first + 1) if c in costs]
        candidates = [c for c in candidates if c > starts[-1]]
        if not candidates:
            # No cut is possible between the two, so they are one layer.
            names[-1] = unit.name if unit.name == LOSS else names[-1]
            continue
        starts.append(min(candidates, key=lambda c: (costs[c], _level(flow, c), -c)))
        names.append(unit.name)
    return Layers(distinct(names), tuple(starts))


@dataclass(frozen=True)
class _Unit:
    """Consecutive heavy operators of one unit: positions of the first and the last."""

    name: str
    first: int
    last: int
    only_looks_up: bool


def _units(flow: Dataflow, unit_of: UnitOf, granularity: str) -> list[_Unit]:
    loss = _loss_position(flow)
    found: list[_Unit] = []
    for position, node in enumerate(flow.work):
        if position == loss or (position > loss and granularity != "operator"):
            continue
        if not is_heavy(node) and granularity != "operator":
            continue
        looks_up = packet_name(node).startswith("embedding")
        unit = _Unit(unit_of(node) or "forward", position, position, looks_up)
        if found and granularity != "operator" and _joins(found[-1], unit):
            last = found.pop()
            unit = _Unit(last.name, last.first, position, last.only_looks_up and looks_up)
        found.append(unit)
    found.append(_Unit(LOSS, loss, len(flow.work) - 1, False))
    return sorted(found, key=lambda unit: unit.first)


def _joins(before: _Unit, unit: _Unit) -> bool:
    return before.name == unit.name or (before.only_looks_up and unit.only_looks_up)


def _loss_position(flow: Dataflow) -> int:
    """Where the loss begins: the first loss-like work after the last heavy operator."""
    heavy = [p for p, node in enumerate(flow.work) if is_heavy(node)]
    start = heavy[-1] + 1 if heavy else 0
    for position in range(start, len(flow.work)):
        if is_loss(flow.work[position]):
            return position
    for position in range(start, len(flow.work)):
        value = tensor_value(flow.work[position])
        if value is not None and value.dim() == 0:
            return position
    return len(flow.work) - 1


def _cut_costs(flow: Dataflow, facts: TensorFacts) -> dict[int, int]:
    """Bytes that cross each possible cut ``c``, between work ``c - 1`` and ``c``."""
    count = len(flow.work)
    last_use = _last_uses(flow)
    change, blocked = [0] * (count + 1), [0] * (count + 1)
    for node, made in flow.position.items():
        used = last_use.get(node, made)
        if used <= made:
            continue
        value = tensor_value(node)
        if value is None or not facts.can_cross(node):
            blocked[made + 1] += 1
            blocked[used + 1] -= 1 if used + 1 <= count else 0
            continue
        cost = traced_bytes(value) + (0 if facts.can_be_recut(node) else _COST_OF_UNORDERED_ROWS)
        change[made + 1] += cost
        change[used + 1] -= cost
    for lo, hi in flow.together:
        blocked[lo + 1] += 1
        blocked[hi + 1] -= 1
    costs: dict[int, int] = {}
    total = barred = 0
    for cut in range(1, count):
        total, barred = total + change[cut], barred + blocked[cut]
        if not barred:
            costs[cut] = total
    return costs


def _last_uses(flow: Dataflow) -> dict[fx.Node, int]:
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(flow.work):
        for source in flow.needs[node]:
            last[source] = position
    output = next(n for n in flow.clean.graph.nodes if n.op == "output")
    for source in flow.needs[output]:
        last[source] = len(flow.work) - 1
    return last


def _level(flow: Dataflow, cut: int) -> int:
    """How deep in the module tree a cut is: the length of the path that both sides share."""
    before, after = (module_path(flow.work[p]).split(".") for p in (cut - 1, cut))
    shared = 0
    for one, other in zip(before, after, strict=False):
        if one != other:
            break
        shared += 1
    return shared
