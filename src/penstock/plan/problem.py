"""A planning problem: a profile, a cluster, a batch, and what plans may use."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Literal, TypeAlias, TypeVar, cast

from penstock.cluster.cluster import Cluster, may_be, with_memory_reserve
from penstock.errors import BadInput
from penstock.plan.choices import choice_refusal
from penstock.plan.pins import Pin
from penstock.plan.plan import MOST_MICRO_BATCHES, Plan, Stage, StateOn
from penstock.profile.model_profile import ModelProfile, check_costs_at
from penstock.text import html_table

MEMORY_RESERVE = 0.05
"""By default, the share of each device's memory that plans leave free: for the allocator's gaps,
and for what a profile does not record."""

LARGEST_BATCH = 10_000_000
"""The most samples of a global batch."""

AS_FAST = 0.002
"""By default, plans that are slower than the best by at most this share count as equally fast."""

PREDICTION_ERROR, SHARED_CORES_ERROR = 0.03, 0.05
"""Shares of the best time by which plans to be trained may be slower and count as equally fast.
Measured runs differ from their predictions by that much, and most of them are slower, the more
devices and stages they have (`benchmarks/prediction/README.md`). The second holds where ranks share
cores, for which they wait after every message."""

StateChoice: TypeAlias = Literal["auto", "device", "host"]
"""The place of optimizer state and step: that with which a plan is faster or possible, the devices,
or host memory."""

RecomputeChoice: TypeAlias = Literal["auto", "on", "off"]
"""Recompute of whole stages: where memory requires it, all of them, none."""

BlockChoice: TypeAlias = Literal["no", "allowed", "always"]
"""Recompute by block: no stage, where it makes a plan faster or possible, all stages."""

RecomputeOption: TypeAlias = Literal["auto", "stage", "on", "blocks", "off"]
"""The recompute option of users; `penstock.planners.problem` explains it."""

ShardingChoice: TypeAlias = Literal["auto", "off", "optimizer", "parameters"]
"""State that the devices of stages shard: any where it makes a plan faster or possible, none,
the optimizer's state in all stages, or the parameters too (`penstock.costs.sharding`)."""


@dataclass(frozen=True, repr=False)
class PlanningProblem:
    """The problem for which a planner makes a plan.

    - ``micro_batch_sizes``: the sizes to try; each must divide ``global_batch``.
    - ``optimizer_bytes_per_parameter_byte``: the optimizer's state, 2 for Adam in the precision of
      the parameters. Of these ``kept_on_device`` is no optimizer's, as an average of the weights.
    - ``state_on``: where it is, in all stages. Costs are those on the devices.
    - ``schedules``: the names of the schedules that a plan may use, in order of preference.
    - ``max_stages``: the most stages; 0 for no bound.
    - ``memory_reserve``: the share of each device's memory that plans leave free. The devices of
      ``cluster`` then have so much less.
    - ``as_fast``: a simpler plan may be slower by this share
      (`penstock.planners.search.preference`).
    - ``pins``: parts of the plan that are fixed. The score of a plan that breaks one is infinite.

    Raises:
        BadInput: a device of the profile's own kind with another speed than 1, a batch below 1, a
            micro-batch size that does not divide it, more stages than layers, no schedule, a
            reserve of all memory, or a negative size.
    """

    profile: ModelProfile
    cluster: Cluster
    global_batch: int
    micro_batch_sizes: tuple[int, ...]
    optimizer_bytes_per_parameter_byte: float = 2.0
    recompute: RecomputeChoice = "auto"
    blocks: BlockChoice = "no"
    sharding: ShardingChoice = "off"
    schedules: tuple[str, ...] = ("1f1b", "early-backward", "gpipe")
    max_stages: int = 0
    memory_reserve: float = 0.0
    as_fast: float = 0.0
    pins: tuple[Pin, ...] = ()
    state_on: StateChoice = "device"
    kept_on_device: float = 0.0

    def __repr__(self) -> str:
        return (
            f"PlanningProblem('{self.profile.name}' on '{self.cluster.name}', batch "
            f"{self.global_batch}, {len(self.schedules)} schedules)"
        )

    def _repr_html_(self) -> str:
        pins = "; ".join(pin.text for pin in self.pins) or "none"
        rows = [
            ("profile", f"{self.profile.name}: {len(self.profile.layers)} layers"),
            ("cluster", f"{self.cluster.name}: {len(self.cluster.devices)} devices"),
            ("batch", self.global_batch),
            ("micro-batches of", ", ".join(map(str, self.micro_batch_sizes))),
            ("recompute", self.recompute),
            ("schedules", ", ".join(self.schedules)),
            ("memory kept free", f"{100 * self.memory_reserve:g} %"),
            ("pins", pins),
        ]
        return html_table(["problem", ""], rows)

    @cached_property
    def known_answers(self) -> dict[object, object]:
        """A cache for functions that compute something about this problem (`remembered`)."""
        return {}

    def under(self, schedules: tuple[str, ...]) -> "PlanningProblem":
        """The problem under other schedules; what is known of this one is shared with it."""
        other = replace(self, schedules=schedules)
        other.__dict__["known_answers"] = self.known_answers
        return other

    def with_state_on(self, place: StateChoice) -> "PlanningProblem":
        """The problem with the costs of a place of the optimizer's state, as if on the devices."""
        if place == "device" or self.profile.device == "cpu":
            return replace(self, state_on="device") if self.state_on != "device" else self
        kept = min(self.kept_on_device, self.optimizer_bytes_per_parameter_byte)
        return replace(
            self,
            profile=self.profile.stepped_on_host,
            optimizer_bytes_per_parameter_byte=kept,
            state_on="device",
        )

    @property
    def places(self) -> tuple[StateOn, ...]:
        """The places of the optimizer's state that a plan may have."""
        if self.state_on != "auto":
            return (self.state_on,)
        known = self.profile.host_step_s_per_byte and self.profile.device != "cpu"
        return ("device", "host") if known else ("device",)

    @property
    def recompute_choices(self) -> tuple[bool, ...]:
        """Whole recompute that a stage may have, as booleans: keeping its activations first."""
        return {"auto": (False, True), "on": (True,), "off": (False,)}[self.recompute]

    @property
    def allows_blocks(self) -> bool:
        """True if a stage may recompute by block, or not, under some schedule."""
        may = self.recompute == "auto" and self.blocks == "allowed"
        return may and not all(choice_refusal("blocks", name) for name in self.schedules)

    @property
    def recompute_ways(self) -> tuple[tuple[bool, bool], ...]:
        """Pairs of recompute as a whole, and by block, that a stage may have: keeping all first."""
        if self.blocks == "always":
            return ((False, True),)
        whole = tuple((recompute, False) for recompute in self.recompute_choices)
        return (*whole, (False, True)) if self.allows_blocks else whole

    @property
    def shardings(self) -> tuple[str, ...]:
        """Values of `Stage.sharding` that a stage may have."""
        every = {"auto": ("", "optimizer", "parameters"), "off": ("",)}
        return every.get(self.sharding, (self.sharding,))

    def sharding_of(self, stage: Stage) -> str:
        """The sharding of a stage: its own, or the one that the problem requires."""
        if stage.sharding or self.sharding in ("auto", "off") or stage.replicas < 2:
            return stage.sharding
        return self.sharding

    def __post_init__(self) -> None:
        if not 0 <= self.memory_reserve < 1:
            raise BadInput(
                f"the memory reserve is {self.memory_reserve}; it is a share of each device's "
                f"memory: give at least 0 and less than 1, such as {MEMORY_RESERVE}"
            )
        reserved = with_memory_reserve(self.cluster, self.memory_reserve)
        object.__setattr__(self, "cluster", reserved)
        check_batch(self.global_batch)
        if self.global_batch < 1 or not self.micro_batch_sizes:
            raise BadInput(
                f"global batch {self.global_batch} with micro-batch sizes "
                f"{list(self.micro_batch_sizes)}: the batch must be >= 1, with at least one size"
            )
        for size in self.micro_batch_sizes:
            if size < 1 or self.global_batch % size:
                sizes = micro_batch_sizes_of(self.global_batch)
                raise BadInput(
                    f"micro-batch size {size} does not divide the global batch "
                    f"{self.global_batch}; use one of {list(sizes[::-1][:12])}"
                )
        check_speeds(self.profile, self.cluster)
        check_costs_at(self.profile, max(self.micro_batch_sizes))
        layers = len(self.profile.layers)
        if not 0 <= self.max_stages <= layers:
            raise BadInput(
                f"max_stages is {self.max_stages} and profile '{self.profile.name}' has {layers} "
                f"layers, which are never cut; give 1 to {layers} stages, or 0 for no bound"
            )
        if not self.schedules:
            raise BadInput("no schedule is allowed; name at least one, such as '1f1b'")
        if not 0 <= self.optimizer_bytes_per_parameter_byte < float("inf"):
            raise BadInput(
                f"optimizer_bytes_per_parameter_byte is "
                f"{self.optimizer_bytes_per_parameter_byte}; it must be finite and >= 0"
            )


def in_blocks(problem: PlanningProblem) -> PlanningProblem:
    """The problem of plans that recompute by block on all stages, as plans that keep everything.

    A planner solves it like any other; `penstock.plan.plan.with_recompute` turns its plans into
    those by block. Only schedules that can recompute by block are left.
    """
    able = schedules_for(problem, "blocks", "--recompute blocks", "--recompute stage")
    profile = problem.profile.by_block
    return replace(problem, profile=profile, recompute="off", blocks="no", schedules=able)


def dividing(problem: PlanningProblem, sharding: ShardingChoice) -> PlanningProblem:
    """The problem of plans in which the devices of every stage divide ``sharding``.

    Planners count that for every stage, and `penstock.costs.sharding.with_sharding` says so in
    their plans. Only schedules that allow it are left.
    """
    able = schedules_for(problem, sharding, f"--sharding {sharding}", "--sharding off")
    return replace(problem, sharding=sharding, schedules=able)


def schedules_for(
    problem: PlanningProblem, choice: str, option: str, instead: str
) -> tuple[str, ...]:
    """The allowed schedules under which stages can have a choice (`choice_refusal`)."""
    refusals = {name: choice_refusal(choice, name) for name in problem.schedules}
    able = tuple(name for name, refusal in refusals.items() if not refusal)
    if not able:
        raise BadInput(
            f"with {option} no stage runs under schedule {', '.join(problem.schedules)}, which "
            f"{refusals[problem.schedules[0]]}; allow '1f1b', or use {instead}"
        )
    return able


def check_batch(batch: int) -> None:
    """Raise `BadInput` for a global batch that is too large to plan for."""
    if batch > LARGEST_BATCH:
        raise BadInput(
            f"the global batch has {batch} samples; at most {LARGEST_BATCH} can be planned for"
        )


def micro_batch_sizes_of(batch: int) -> tuple[int, ...]:
    """All divisors of a batch, largest first; none that makes more micro-batches than a plan has.

    >>> micro_batch_sizes_of(12)
    (12, 6, 4, 3, 2, 1)
    """
    check_batch(batch)
    counts = range(1, min(batch, MOST_MICRO_BATCHES) + 1)
    return tuple(batch // count for count in counts if batch % count == 0)


def check_speeds(profile: ModelProfile, cluster: Cluster) -> None:
    """Raise `BadInput` where speeds are relative to another device than the profile's.

    For example, take a profile that was estimated for an H100, and a preset whose H100 has its
    speed relative to a V100. All times would be four times too short. CPUs have one name, however
    fast they are. Beside usual devices of the kind there may be slow ones.
    """
    kind = profile.device
    speeds = [device.speed for device in cluster.devices if device.kind == kind]
    if kind != "cpu" and speeds and 1.0 not in speeds:
        raise BadInput(
            f"profile '{profile.name}' is of a {kind}, but cluster '{cluster.name}' gives that "
            f"device the speed {speeds[0]:g}, relative to another one; write the cluster with "
            f"speed = 1 for {kind}, and other kinds relative to it"
        )


def other_kinds_words(profile: ModelProfile, cluster: Cluster) -> str:
    """That devices of another kind count as fast as the profile's own; empty where none do."""
    own = profile.device
    kinds = dict.fromkeys(device.kind for device in cluster.devices if device.speed == 1.0)
    other = [kind for kind in kinds if own and not may_be(kind, own)]
    if not other:
        return ""
    return (
        f"the times of profile '{profile.name}' are of {own}, and cluster '{cluster.name}' counts "
        f"{', '.join(other)} as equally fast (speed = 1)"
    )


def foreign_kinds(profile: ModelProfile, cluster: Cluster) -> list[str]:
    """The devices for which a profile has only another device's times.

    A speed relative to the profile's own device says what another kind takes; it does where the
    cluster has that device as well.
    """
    own = profile.device
    kinds = {device.kind: device.speed for device in cluster.devices}
    other = [kind for kind in kinds if own and not may_be(kind, own)]
    return [kind for kind in other if kinds[kind] == 1.0 or len(other) == len(kinds)]


Score: TypeAlias = Callable[[Plan], float]
"""Seconds of one iteration of a plan; infinite where it does not fit in memory."""


def score_of(plan: Plan, score: Score) -> float:
    """The score of a plan; infinite where its schedule refuses the plan."""
    try:
        return score(plan)
    except BadInput:
        return inf


Planner: TypeAlias = Callable[[PlanningProblem, Score], Plan]
"""From a problem and the simulator's score to a plan. Raises `Infeasible` when nothing fits."""


MOST_ANSWERS = 100_000
"""The most cached answers of each kind."""

Answer = TypeVar("Answer")


def remembered(find: Callable[[PlanningProblem], Answer]) -> Callable[[PlanningProblem], Answer]:
    """``find``, with its result kept beside the problem; hashing a problem would be slow.

    The result must not depend on the problem's schedules; else see `remembered_by_schedules`.
    """

    return lambda problem: recalled(problem, find, None, lambda: find(problem))


def remembered_by_schedules(
    find: Callable[[PlanningProblem], Answer],
) -> Callable[[PlanningProblem], Answer]:
    """As `remembered`, with a result for the schedules of each `PlanningProblem.under`."""

    return lambda problem: recalled(problem, find, problem.schedules, lambda: find(problem))


def recalled(
    problem: PlanningProblem, kind: object, key: object, find: Callable[[], Answer]
) -> Answer:
    """The answer of a kind that the problem keeps under ``key``, or the one found now.

    All others of the kind are dropped where there are too many.
    """
    known = cast("dict[object, Answer]", problem.known_answers.setdefault(kind, {}))
    answer = known.get(key)
    if answer is None:
        answer = find()
        if len(known) >= MOST_ANSWERS:
            known.clear()
        known[key] = answer
    return answer
