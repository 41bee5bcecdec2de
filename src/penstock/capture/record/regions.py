"""Findings from the calls of a run: values that depend on parameters, ranges without a cut."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from penstock.capture.record.calls import MASK, Address, ProgramRecord
from penstock.torch_internals import forward_hooks


def find_dependent(record: ProgramRecord) -> None:
    """Find the calls and values that depend on parameters, and sizes that activations decide."""
    by_activations = False
    for number, event in enumerate(record.events):
        of_stages = not record.dependent.isdisjoint(event.reads)
        if of_stages and event.func is None and event.address[1] == MASK:
            event.reads_values, of_stages, by_activations = False, False, True
            event.reads = []
            continue
        event.depends = event.is_unit or bool(event.params) or of_stages
        own = {value for value in event.makes if record.values[value].maker == number}
        if by_activations or not record.decided.isdisjoint(event.reads):
            record.decided |= own
        by_activations = False
        if event.depends:
            record.dependent |= own


def keep_with_writes(record: ProgramRecord, owners: Mapping[str, str]) -> None:
    """Forbid cuts among calls that read a tensor which is written to, or what it is made of.

    As where forward itself moves an average of weights: the stage that does it needs them all.
    ``owners`` are the units that hold parameters.
    """
    for name, writes in record.parameter_writes.items():
        names = {name}.union(*(record.events[number].params for number in record.behind(writes)))
        _keep_users(record, names, {owners.get(own) for own in names}, writes)
    for name, writes in record.local_buffers.items():
        units = {unit for unit in record.units if name.startswith(f"{unit}.")}
        _keep_users(record, {name}, units, writes)


def _keep_users(
    record: ProgramRecord, names: set[str], units: Collection[str | None], writes: list[int]
) -> None:
    """Forbid cuts among these writes and the calls that read these tensors."""
    users = [
        number
        for number, event in enumerate(record.events)
        if names.intersection((*event.params, *event.buffers))
        or (event.is_unit and event.address[0] in units)
    ]
    keep_together(record, [*users, *writes])


def keep_together(record: ProgramRecord, calls: Sequence[int]) -> None:
    """Let there be no cut from the first to the last of these calls."""
    record.regions.append((min(calls), max(calls) + 1))


def keep_unit_together(record: ProgramRecord, path: str) -> None:
    """Let there be no cut from the first to the last call of a unit."""
    calls = [n for n, e in enumerate(record.events) if e.is_unit and e.address[0] == path]
    if len(calls) > 1:
        keep_together(record, calls)


def keep_carried(record: ProgramRecord, makers: Sequence[int], reads: Iterable[Address]) -> bool:
    """Forbid cuts from these calls that made a piece of state to those that read it next time.

    Return whether it is made of the batch or activations, so that it matters.
    """
    if not makers or not record.is_local(makers):
        return False
    every = [n for n, event in enumerate(record.events) if event.address in reads]
    keep_together(record, [*every, *makers])
    return True


def open_blocks(record: ProgramRecord) -> None:
    """Let blocks run of which others use more than the result."""
    # Where hooks are called, something may be collected for code outside of the block.
    called = [path for path, module in record.program.named_modules() if forward_hooks(module)]
    for block in record.blocks:
        results = {made.what for made in block.result[0] if made.kind == "made"}
        inside = range(block.first, block.last)
        block.closed = (
            block.closed
            and not any(path.startswith(f"{block.path}.") for path in called)
            and not any(e.random and not e.depends for e in record.events[block.first : block.last])
            and not any(
                record.values[value].maker in inside and value not in results
                for number, event in enumerate(record.events)
                if number not in inside
                for value in event.reads
            )
        )
