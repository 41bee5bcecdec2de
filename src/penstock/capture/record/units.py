"""Modules that are units: the smallest parts that a stage runs, or leaves out, as a whole.

    granularity   units inside ``layers.3`` of a list of blocks
    block         layers.3
    module        layers.3.norm, layers.3.attention, layers.3.mlp
    operator      layers.3.attention.query, ...: every module without children

The modules of a `Chain` are units, with parameters or without. Modules outside of lists are opened
down to those without children, or to torch's own.
"""

from collections.abc import Collection
from typing import Literal, TypeAlias

from torch import nn

from penstock.capture.chain import Chain
from penstock.capture.record.model_and_loss import UserProgram

Granularity: TypeAlias = Literal["block", "module", "operator"]

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def units_of(
    program: UserProgram,
    granularity: Granularity,
    opened: Collection[str],
    closed: Collection[str] = (),
) -> tuple[str, ...]:
    """The paths of the units in the order of the module tree.

    None of them is in ``opened``; modules in ``closed`` are units whatever the granularity, and
    also without parameters.
    """
    found: list[str] = []
    seen: set[int] = set()
    lists = {path for path, part in program.named_modules() if isinstance(part, _LISTS)}
    chain = program.model.layer_names if isinstance(program.model, Chain) else ()
    closed = {*closed, *chain} - {*opened}

    def visit(path: str, module: nn.Module) -> None:
        prefix = f"{path}." if path else ""
        is_empty = next(module.parameters(), None) is None
        if is_empty and path not in closed and not any(p.startswith(prefix) for p in closed):
            return
        if id(module) in seen:
            return  # a module that is reached by two names is one unit
        seen.add(id(module))
        inner = path not in program.root_names and path not in opened
        if inner and (path in closed or (closes(path, module) and not is_empty)):
            found.append(path)
            return
        for name, child in module.named_children():
            visit(f"{prefix}{name}", child)

    def closes(path: str, module: nn.Module) -> bool:
        if not any(True for _ in module.children()):
            return True
        if granularity == "operator" or _holds_blocks(module):
            return False
        own = is_torchs(module) and not isinstance(module, _LISTS)
        parent = path.rpartition(".")[0]
        if parent in lists and path:
            return granularity == "block" or own
        return own or (granularity == "module" and parent.rpartition(".")[0] in lists)

    for root in program.root_names:
        visit(root, program.module(root))
    return tuple(found)


def blocks_around(
    program: UserProgram, units: Collection[str], opened: Collection[str]
) -> tuple[str, ...]:
    """Blocks that hold several units; where none of these is a stage's, the block is left out."""
    whole = units_of(program, "block", opened)
    return tuple(
        path
        for path in whole
        if path not in units and any(unit.startswith(f"{path}.") for unit in units)
    )


def modules_between(program: UserProgram, units: Collection[str]) -> list[str]:
    """The paths of the modules that are no unit nor in one."""
    inside = tuple(f"{path}." for path in units)
    return [
        path
        for path, _ in program.named_modules()
        if path not in units and not path.startswith(inside)
    ]


def is_torchs(module: nn.Module) -> bool:
    """Return whether the class is torch's own, whose code calls its children in its own way."""
    return type(module).__module__.startswith("torch.nn.")


def _holds_blocks(module: nn.Module) -> bool:
    """Return whether there is a list inside whose entries have children: blocks."""
    return any(
        any(True for _ in entry.children())
        for part in module.modules()
        if isinstance(part, nn.ModuleList | nn.Sequential)
        for entry in part.children()
    )
