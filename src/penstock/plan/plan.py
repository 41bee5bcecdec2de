"""Plans: the layers, devices and rows of each stage, and the schedule."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, TypeAlias

from penstock.errors import BadInput
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape, StageCost
from penstock.text import counted, html_table, numbers_text

MOST_MICRO_BATCHES = 65_536
"""The most micro-batches of an iteration."""

SHARDINGS = ("", "optimizer", "parameters")
"""Kinds of state that the devices of a stage may shard; see `Stage`."""

MOST_RANKS = 64
"""The most ranks of a tensor group that a planner may choose."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous run of layers on one or more replica devices.

    ``slices[i]`` is the number of rows of every micro-batch that ``devices[i]`` computes. With
    ``recompute``, the activations of all layers are computed a second time before the backward.
    With ``by_block`` instead, each layer keeps only what it reads, and runs again at the start of
    its own backward.

    ``sharding`` is what the devices divide among themselves instead of keeping it whole:
    "optimizer" is the optimizer's state (ZeRO-1), "parameters" are parameters, gradients and the
    optimizer's state (ZeRO-3, FSDP). Empty: nothing.

    With ``in_turn`` the devices take whole micro-batches in turn, as in PipeDream's 1F1B-RR:
    micro-batch ``m`` goes to device ``m % replicas``, and each slice is a whole micro-batch.
    """

    layers: range
    devices: tuple[int, ...]
    slices: tuple[int, ...]
    recompute: bool = False
    by_block: bool = False
    sharding: str = ""
    in_turn: bool = False

    def __post_init__(self) -> None:
        if self.by_block and self.recompute:
            object.__setattr__(self, "by_block", False)
        if self.sharding and len(self.devices) < 2:
            object.__setattr__(self, "sharding", "")
        if self.in_turn and len(self.devices) < 2:
            object.__setattr__(self, "in_turn", False)

    @property
    def replicas(self) -> int:
        """The number of devices that share the stage."""
        return len(self.devices)


StateOn: TypeAlias = Literal["device", "host"]
"""The place where optimizers have their state, and step."""


@dataclass(frozen=True, repr=False)
class Plan:
    """Stages with their devices, the micro-batches, and the name of the schedule.

    Stages with the same devices, in the same order, share them. All other stages have devices of
    their own. ``in_flight_limit`` has one entry for each stage, or is empty for no limit. Some
    schedules adapt their order to costs and memory. Then ``costs`` (one for each stage) and
    ``memory_bytes`` (one for each set of devices) are those for which the order was made, so that a
    run finds the same order without the profile. Predictions are stored beside a plan, not inside
    it, because a plan may be written by hand. Plans of two planners are equal if all else is.

    A device of the plan is one rank, that of its number, or a group of ranks that share its stages
    by tensor parallelism: ``tensor_groups[device]`` are its ranks. Empty: every device is one rank.

    With ``state_on="host"`` optimizers have their state in host memory, and step there.

    Raises:
        BadInput: layers not covered once, stages that share some devices but not all, slices that
            do not add up, groups that share ranks or are of different sizes in one stage.
    """

    stages: tuple[Stage, ...]
    micro_batches: int
    micro_batch_size: int
    schedule: str
    planner: str = field(default="hand", compare=False)
    in_flight_limit: tuple[int, ...] = ()
    costs: tuple[StageCost, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    tensor_groups: tuple[tuple[int, ...], ...] = ()
    state_on: StateOn = "device"

    def __post_init__(self) -> None:
        check_plan(self)
        check_tensor_groups(self)

    def __repr__(self) -> str:
        return f"Plan({plan_words(self)})"

    def _repr_html_(self) -> str:
        return plan_html(self, plan_words(self))

    def __hash__(self) -> int:
        """Computed once: planners look up every plan several times."""
        return self.known_hash

    @cached_property
    def known_hash(self) -> int:
        """The hash of the fields by which plans differ."""
        order = self.schedule, self.in_flight_limit, self.costs, self.memory_bytes
        return hash((self.stages, self.micro_batches, order, self.tensor_groups))

    def __getstate__(self) -> dict[str, object]:
        """All fields. Another process has other hashes of words."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def global_batch(self) -> int:
        """Samples of one iteration."""
        return self.micro_batches * self.micro_batch_size

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Every device in use, once, in order of stage and replica."""
        return tuple(device for group in self.device_groups for device in group)

    @cached_property
    def device_groups(self) -> tuple[tuple[int, ...], ...]:
        """The different sets of devices, in order of their first stage."""
        return tuple(dict.fromkeys(stage.devices for stage in self.stages))

    def ranks_of(self, device: int) -> tuple[int, ...]:
        """The ranks of a device: its tensor group, or the one rank of the same number."""
        return self.tensor_groups[device] if self.tensor_groups else (device,)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank in use, once, in order of stage, replica and place in the tensor group."""
        return tuple(rank for device in self.devices for rank in self.ranks_of(device))

    def device_of(self, rank: int) -> int:
        """The device to which ``rank`` belongs; -1 if the plan does not use the rank."""
        return next((d for d in self.devices if rank in self.ranks_of(d)), -1)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The device group of every stage; empty where each stage has its own."""
        groups = {devices: group for group, devices in enumerate(self.device_groups)}
        if len(groups) == len(self.stages):
            return ()
        return tuple(groups[stage.devices] for stage in self.stages)

    @property
    def mirrored(self) -> bool:
        """True if the schedule holds every stage twice, on its own devices and the opposite's."""
        family = FAMILIES.get(self.schedule)
        return family is not None and family.placement == "mirrored"

    def stage_of_layer(self, layer: int) -> int:
        """The stage that holds ``layer``."""
        return next(s for s, stage in enumerate(self.stages) if layer in stage.layers)

    def holder(self, stage: int, micro_batch: int) -> Stage:
        """The stage whose devices and slices work on a micro-batch of ``stage``.

        In a mirrored schedule the devices of the opposite stage work on micro-batches of odd
        number. In all other cases a stage's own devices do.
        """
        opposite = self.mirrored and micro_batch % 2
        return self.stages[len(self.stages) - 1 - stage if opposite else stage]

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """A number for each stage, the same for stages on the same devices with the same slices.

        What such stages read is sent to their home once. Mirrored or without a flush, each stage
        has a home of its own.
        """
        numbers: dict[object, int] = {}
        held = ((stage.devices, stage.slices) for stage in self.stages)
        return tuple(numbers.setdefault(home, len(numbers)) for home in held)

    def senders(self, maker: int, readers: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Pairs: the stage that sends a tensor of stage ``maker`` on, and each of its ``readers``.

        The maker sends it to the first reader of each home but its own. That one passes it on
        within the home, and adds the gradients that come back. ``readers`` are in ascending order.

        >>> stages = tuple(Stage(range(s, s + 1), (s % 2,), (1,)) for s in range(6))
        >>> list(Plan(stages, 2, 1, "interleaved").senders(0, (1, 2, 3, 5)))
        [(0, 1), (0, 2), (1, 3), (1, 5)]
        """
        homes = self.homes
        first = {homes[maker]: maker}
        for reader in readers:
            there = first.setdefault(homes[reader], reader)
            yield (maker if there == reader else there), reader

    def devices_of(self, stage: int) -> tuple[int, ...]:
        """All devices that hold ``stage``, those of its copy in a mirrored schedule after its own.

        >>> stages = tuple(Stage(range(s, s + 1), (s,), (1,)) for s in range(4))
        >>> Plan(stages, 2, 1, "chimera").devices_of(1)
        (1, 2)
        """
        holders = (self.holder(stage, micro_batch) for micro_batch in (0, 1))
        return tuple(dict.fromkeys(device for holder in holders for device in holder.devices))

    def shape(self) -> PipelineShape:
        """The shape of this plan, from which a schedule makes an order."""
        return self.known_shape

    @cached_property
    def known_shape(self) -> PipelineShape:
        return PipelineShape(
            stages=len(self.stages),
            micro_batches=self.micro_batches,
            placement=self.placement,
            in_flight_limit=self.in_flight_limit,
            recompute=tuple(stage.recompute for stage in self.stages),
            costs=self.costs,
            memory_bytes=self.memory_bytes,
            mirrored=self.mirrored,
        )


def with_order(
    plan: Plan,
    schedule: str,
    in_flight_limit: tuple[int, ...] = (),
    costs: tuple[StageCost, ...] = (),
    memory_bytes: tuple[float, ...] = (),
) -> Plan:
    """The plan with another order of work; its stages were checked before, and are not again."""
    other: Plan = object.__new__(Plan)
    fresh = {"schedule": schedule, "in_flight_limit": in_flight_limit}
    kept = {name: value for name, value in vars(plan).items() if not name.startswith("known_")}
    vars(other).update(kept, **fresh, costs=costs, memory_bytes=memory_bytes)
    return other


def with_state_on(plan: Plan, place: StateOn) -> Plan:
    """The plan with optimizer state elsewhere; its stages were checked before."""
    if plan.state_on == place:
        return plan
    other: Plan = object.__new__(Plan)
    vars(other).update(vars(plan), state_on=place)
    return other


def with_cut(plan: Plan, stage: int, start: int) -> Plan:
    """The plan with ``stage`` starting at another layer."""
    stages = list(plan.stages)
    before, after = stages[stage - 1], stages[stage]
    wider, narrower = range(before.layers.start, start), range(start, after.layers.stop)
    stages[stage - 1] = replace(before, layers=wider)
    stages[stage] = replace(after, layers=narrower)
    return replace(plan, stages=tuple(stages))


def with_recompute(plan: Plan, recompute: bool, *, by_block: bool = False) -> Plan:
    """The plan with recompute of whole stages, or by block, on all stages; or on none."""
    return replace(
        plan,
        stages=tuple(replace(s, recompute=recompute, by_block=by_block) for s in plan.stages),
    )


def check_plan(plan: Plan) -> None:
    """Raise `BadInput` for a plan that no run could follow."""
    if not plan.stages:
        raise BadInput("the plan has no stages; it needs at least one")
    if plan.micro_batches < 1 or plan.micro_batch_size < 1:
        raise BadInput(
            f"the plan has {plan.micro_batches} micro-batches of {plan.micro_batch_size} samples; "
            f"both must be >= 1"
        )
    if plan.micro_batches > MOST_MICRO_BATCHES:
        raise BadInput(
            f"the plan has {plan.micro_batches} micro-batches; at most {MOST_MICRO_BATCHES} can be "
            f"simulated or run; make them larger"
        )
    expected_start = 0
    for index, stage in enumerate(plan.stages):
        layers = stage.layers
        if layers.start != expected_start or layers.stop <= expected_start or layers.step != 1:
            raise BadInput(
                f"stage {index} holds layers [{layers.start}, {layers.stop}); it must "
                f"start at layer {expected_start} and hold at least one"
            )
        expected_start = layers.stop
        if stage.sharding not in SHARDINGS:
            raise BadInput(
                f"stage {index} has sharding {stage.sharding!r}; it must be one of "
                f"{', '.join(map(repr, SHARDINGS))}"
            )
        if len(stage.devices) == 1 and stage.slices == (plan.micro_batch_size,):
            continue
        if not stage.devices or len(stage.slices) != len(stage.devices):
            raise BadInput(
                f"stage {index} has {len(stage.devices)} devices and {len(stage.slices)} slices; "
                f"it needs one slice for each of at least one device"
            )
        if stage.in_turn:
            check_turns(plan, index)
            continue
        if sum(stage.slices) != plan.micro_batch_size or min(stage.slices) < 1:
            raise BadInput(
                f"stage {index}: slices {list(stage.slices)} must be >= 1 and add up to the "
                f"micro-batch size {plan.micro_batch_size}"
            )
    used = plan.devices
    if len(set(used)) != len(used) or min(used) < 0:
        raise BadInput(
            f"devices {list(used)} of the plan's sets of devices must be distinct and >= 0; stages "
            f"that share a device must share all of theirs, in the same order"
        )
    for name, values, wanted in (
        ("costs", plan.costs, len(plan.stages)),
        ("memory_bytes", plan.memory_bytes, len(plan.device_groups)),
    ):
        if len(values) not in (0, wanted):
            raise BadInput(f"{name} of the plan has {len(values)} entries; give {wanted}, or none")
    if plan.in_flight_limit and (
        len(plan.in_flight_limit) != len(plan.stages) or min(plan.in_flight_limit) < 1
    ):
        raise BadInput(
            f"in_flight_limit {list(plan.in_flight_limit)} must have one entry >= 1 for each of "
            f"{len(plan.stages)} stages"
        )


def check_turns(plan: Plan, index: int) -> None:
    """Raise `BadInput` for a stage whose devices cannot take whole micro-batches in turn."""
    stage, size = plan.stages[index], plan.micro_batch_size
    if set(stage.slices) != {size}:
        raise BadInput(
            f"stage {index} takes micro-batches in turn and has slices {list(stage.slices)}; each "
            f"must be a whole micro-batch of {size} samples"
        )
    if plan.micro_batches < stage.replicas:
        raise BadInput(
            f"stage {index} takes micro-batches in turn on {stage.replicas} devices, and there are "
            f"{plan.micro_batches}; give it at most as many devices"
        )
    shared = sum(other.devices == stage.devices for other in plan.stages) > 1
    if shared or plan.mirrored or stage.sharding:
        raise BadInput(
            f"stage {index} takes micro-batches in turn; its devices can hold no other stage, nor "
            f"a mirrored one, and divide nothing"
        )


def rank_pairs(senders: Sequence[int], receivers: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of the rank of the sending device and the rank of the receiving device, by receiver.

    >>> rank_pairs((0, 1), (4,)), rank_pairs((4,), (0, 1)), rank_pairs((0, 1), (0, 1))
    ([(0, 4)], [(4, 0), (4, 1)], [(0, 0), (1, 1)])
    """
    return [(senders[k % len(senders)], receiver) for k, receiver in enumerate(receivers)]


def check_tensor_groups(plan: Plan) -> None:
    """Raise `BadInput` unless each device has ranks of its own, and each stage groups of a size."""
    groups = plan.tensor_groups
    if not groups:
        return
    if len(groups) <= max(plan.devices):
        raise BadInput(
            f"tensor_groups of the plan has {len(groups)} entries, and the plan uses device "
            f"{max(plan.devices)}; give the ranks of each device, or no groups at all"
        )
    ranks = [rank for group in groups for rank in group]
    in_order = all(group and list(group) == sorted(group) for group in groups)
    if not in_order or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise BadInput(
            f"tensor_groups of the plan are {[list(group) for group in groups]}; each device needs "
            f"at least one rank, in ascending order, and each rank must be >= 0 and in one group"
        )
    for index, stage in enumerate(plan.stages):
        sizes = [len(groups[device]) for device in stage.devices]
        if len(set(sizes)) > 1:
            raise BadInput(
                f"the devices of stage {index} have tensor groups of {sizes} ranks; all replicas "
                f"of a stage divide its tensors in the same way, so give them groups of one size"
            )


SHARDED = {"": "DDP", "optimizer": "ZeRO-1", "parameters": "FSDP"}
"""The field's words for replicas that divide nothing, or what `Stage.sharding` names."""

MOST_NAMED = 6
"""The most numbers of replicas that are named one by one."""


def plan_words(plan: Plan, device: str = "device") -> str:
    """Describe a plan; ``device`` names what computes: a "device", or a "worker".

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
