"""A plan in words: what runs beside what, in which order, on how much at a time."""

from collections import Counter

from penstock.plan.plan import Plan, Stage
from penstock.text import counted, html_table, numbers_text

SHARDED = {"": "DDP", "optimizer": "ZeRO-1", "parameters": "FSDP"}
"""The field's words for replicas that divide nothing, or what `Stage.sharding` names."""

MOST_NAMED = 6
"""The most numbers of replicas that are named one by one."""


def plan_words(plan: Plan, device: str = "device") -> str:
    """Describe a plan; ``device`` names what computes: a "device", or a "worker".

    >>> from penstock.plan.plan import Stage
    >>> parts = tuple(Stage(range(k, k + 1), (0, 1), (8, 8)) for k in range(3))
    >>> plan_words(Plan(parts, 1, 16, "interleaved"), "worker")
    'DDP over 2 workers, gradients summed in 3 parts; 1 micro-batch of 16 samples'
    >>> one = Stage(range(1), (0,), (2,))
    >>> plan_words(Plan((one, Stage(range(1, 2), (1, 2), (1, 1), True)), 8, 2, "1f1b"))
    '2 stages on 1 + 2 devices, 1f1b, activations recomputed in 1; 8 micro-batches of 2 samples'
    """
    words = parallel_words(plan, device)
    if len(plan.device_groups) > 1:
        words.append(plan.schedule)
    for how, again in (
        ("", sum(stage.recompute for stage in plan.stages)),
        (" by block", sum(stage.by_block for stage in plan.stages)),
    ):
        if again:
            where = "" if again == len(plan.stages) else f" in {again}"
            words.append(f"activations recomputed{how}{where}")
    divided = Counter(stage.sharding for stage in plan.stages if stage.sharding)
    for sharding, stages in sorted(divided.items()):
        where = "" if stages == len(plan.stages) else f" in {stages}"
        if where or len(plan.device_groups) > 1:
            words.append(f"{SHARDED[sharding]}{where}")
    if plan.state_on == "host":
        words.append("optimizer state in host memory")
    if turns := sum(stage.in_turn for stage in plan.stages):
        words.append(f"whole micro-batches in turn in {turns}")
    return f"{', '.join(words)}; {micro_batch_words(plan)}"


def plan_html(plan: Plan, caption: str) -> str:
    """A plan as a table for a notebook."""
    heads = ["stage", "layers", "devices", "rows", "recompute", "sharding"]
    rows = (
        (
            index,
            f"[{s.layers.start}, {s.layers.stop})",
            numbers_text(s.devices),
            numbers_text(s.slices),
            recompute_text(s),
            SHARDED[s.sharding] if s.replicas > 1 else "",
        )
        for index, s in enumerate(plan.stages)
    )
    return html_table(heads, rows, caption)


def recompute_text(stage: Stage) -> str:
    """The recomputation of a stage: ``yes``, ``blocks`` or ``no``.

    >>> recompute_text(Stage(range(2, 6), (0,), (1,), by_block=True))
    'blocks'
    """
    return "blocks" if stage.by_block else "yes" if stage.recompute else "no"


def micro_batch_words(plan: Plan) -> str:
    """The number of micro-batches and of their samples, in words."""
    samples = counted(plan.micro_batch_size, "sample")
    return f"{counted(plan.micro_batches, 'micro-batch')} of {samples}"


def parallel_words(plan: Plan, device: str) -> list[str]:
    """Describe how the work is divided among the devices."""
    stages, groups = len(plan.stages), plan.device_groups
    ranks = sorted({len(plan.ranks_of(member)) for member in plan.devices})
    of_ranks = [f"each {device} is {' or '.join(map(str, ranks))} ranks"] if ranks != [1] else []
    if len(groups) == 1:
        count, summed = len(plan.devices), f"gradients summed in {stages} parts"
        if count == 1:
            return [f"the whole model on 1 {device}", *of_ranks]
        kinds = {stage.sharding for stage in plan.stages}
        over = f"{SHARDED[min(kinds)]} over {counted(count, device)}"
        return [over, *([summed] if stages > 1 else []), *of_ranks]
    sizes = [len(group) for group in groups]
    on = f" x {sizes[0]} replicas" if sizes[0] > 1 else ""
    if len(set(sizes)) > 1:
        each = " + ".join(map(str, sizes))
        each = each if len(sizes) <= MOST_NAMED else f"{min(sizes)} to {max(sizes)}"
        on = f" on {each} {device}s"
    words = [f"{counted(stages, 'stage')}{on}"]
    if plan.mirrored:
        words.append("each held twice")
    elif stages > len(groups):
        held = sorted(set(Counter(stage.devices for stage in plan.stages).values()))
        words.append(f"{' or '.join(map(str, held))} on each {device}")
    return [*words, *of_ranks]
