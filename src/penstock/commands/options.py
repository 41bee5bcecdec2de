"""Arguments and options that several commands share, and options that commands had once."""

import json
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from typer import Argument, Option

if TYPE_CHECKING:
    from penstock.advice.plan_files import PlanInputs
    from penstock.plan.problem import PlanningProblem

MOST_WORKERS = 1024
"""The most processes: more fit into the memory of no machine that we know."""

AsJson: TypeAlias = Annotated[
    bool, Option("--json", help="Print the result as one JSON object (SI units).")
]
Quiet: TypeAlias = Annotated[bool, Option("--quiet", help="Print no progress and no notes.")]
Out: TypeAlias = Annotated[
    str, Option("-o", "--out", metavar="PATH", help="Write the result to this path.")
]
JobName: TypeAlias = Annotated[
    str,
    Argument(metavar="JOB", help="Take a built-in job (see 'penstock list'), or a TOML file."),
]
Changes: TypeAlias = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of JOB; write table.key for that of a table. Repeatable.",
    ),
]
ProfilePath: TypeAlias = Annotated[
    str,
    Argument(
        metavar="PROFILE",
        help="Take a built-in model (see 'penstock list'), or read a profile: Penstock's JSON, "
        "PipeDream's text (.txt).",
    ),
]
PlanPath: TypeAlias = Annotated[
    str, Argument(metavar="PLAN", help="Read this plan, as 'penstock plan -o plan.json' writes it.")
]
PlanToFollow: TypeAlias = Annotated[
    str, Option(metavar="PLAN", help="Follow this plan (default: make one).")
]
PlansProfile: TypeAlias = Annotated[
    str,
    Option(metavar="P", help="Read this profile (default: the one recorded with the plan)."),
]
PlansCluster: TypeAlias = Annotated[
    str, Option(metavar="C", help="Use this cluster (default: the one recorded with the plan).")
]
ProfileBatch: TypeAlias = Annotated[
    int | None,
    Option(min=1, metavar="B", help="Give the batch size that a PipeDream text was profiled with."),
]
ClusterName: TypeAlias = Annotated[
    str,
    Option(metavar="C", help="Take a built-in cluster (see 'penstock list'), or a TOML file."),
]
Batch: TypeAlias = Annotated[
    int, Option(metavar="N", help="Set the global batch: samples in one optimizer step.")
]
MicroBatch: TypeAlias = Annotated[
    int | None,
    Option(
        min=1, metavar="b", help="Set the samples of a micro-batch (default: planner's choice)."
    ),
]
MaxStages: TypeAlias = Annotated[
    int | None, Option(min=1, metavar="S", help="Limit the number of stages.")
]
MemoryReserve: TypeAlias = Annotated[
    float,
    Option(metavar="R", help="Leave this share of each device's memory free."),
]
Optimizer: TypeAlias = Annotated[
    str,
    Option(
        metavar="NAME",
        help="Count the state of this optimizer: adamw, adamw-fp32, adamw8bit, sgd, or its bytes "
        "for each byte of parameters.",
    ),
]
Recompute: TypeAlias = Annotated[
    Literal["auto", "stage", "on", "blocks", "off"],
    Option(
        help="Checkpoint activations. 'auto': where needed, of whole stages or by block; "
        "'stage': where needed, of whole stages; 'on': of every whole stage; 'blocks': by block, "
        "on every stage; 'off': none."
    ),
]
Sharding: TypeAlias = Annotated[
    Literal["auto", "off", "optimizer", "parameters"],
    Option(
        help="Shard state over a stage's devices. 'auto': what makes a plan faster or possible; "
        "'off': nothing; 'optimizer': the optimizer's state (ZeRO-1), in every stage; "
        "'parameters': parameters, gradients and state (FSDP), in every stage. One stage on all "
        "devices is data parallelism: DDP with 'off'."
    ),
]
OptimizerState: TypeAlias = Annotated[
    Literal["auto", "device", "host"],
    Option(
        help="Place the optimizers' state and step, in all stages. 'device': with the "
        "parameters; 'host': in host memory; 'auto': there if that makes a plan faster or possible."
    ),
]
ScheduleNames: TypeAlias = Annotated[
    str,
    Option(
        "--schedule",
        "--schedules",
        metavar="x,y",
        help="Allow these schedules, separated by commas. 'auto': the planner's own; "
        "'whole-backwards': none that splits backwards; 'any': all that flush.",
    ),
]
PlannerName: TypeAlias = Annotated[str, Option(help="Use this planner (see 'penstock list').")]
Device: TypeAlias = Annotated[
    Literal["cpu", "cuda"],
    Option(help="Run the layers there (cuda: a GPU for each rank, if there are enough)."),
]
Workers: TypeAlias = Annotated[
    int, Option(min=1, max=MOST_WORKERS, metavar="N", help="Start N worker processes.")
]


def names_in(text: str) -> list[str]:
    """The names in a list separated by commas.

    >>> names_in("search, data-parallel"), names_in("")
    (['search', 'data-parallel'], [])
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def pins_of_options(given: list[str] | None) -> list[str] | None:
    """The pins, with those of files instead of the files."""
    if not given:
        return given
    from penstock.plan import pins

    return [*pins.read_pins(given)]


Pins: TypeAlias = Annotated[
    list[str] | None,
    Option(
        "--pin",
        metavar="PIN",
        callback=pins_of_options,
        help="Fix a part of the plan, such as 'lm_head: alone', 'stages: 4' or "
        "'blocks.0: stage 0'; or a TOML file with the table [pins]. Repeatable.",
    ),
]
PipelineStages: TypeAlias = Annotated[
    int | None, Option("--pp", min=1, metavar="N", help="Use N stages, as --pin 'stages: N' does.")
]
Csv: TypeAlias = Annotated[
    str, Option("--csv", metavar="PATH", help="Write the rows of the answer as CSV, too.")
]


TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The types that --precision names."""


def pins_with(pins: list[str] | None, stages: int | None) -> list[str] | None:
    """The pins, with that of ``stages`` stages if it is given; None where there are none."""
    return [*(pins or ()), *([f"stages: {stages}"] if stages else ())] or None


AS_JOB: Any = None
"""The value of an option that is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of ``penstock train`` that are keys of its job, too."""

    changes: Changes = None
    steps: Annotated[
        int, Option(min=1, metavar="K", help="Take K optimizer steps (default: the job's).")
    ] = AS_JOB
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Option(help="Compute matrix products in this type; weights stay as they are."),
    ] = AS_JOB
    planner: PlannerName = AS_JOB
    schedule: ScheduleNames = AS_JOB
    micro_batch: MicroBatch = AS_JOB
    recompute: Recompute = AS_JOB
    sharding: Sharding = AS_JOB
    optimizer_state: OptimizerState = AS_JOB
    max_stages: MaxStages = AS_JOB
    memory_reserve: MemoryReserve = AS_JOB
    pin: Pins = None
    pp: PipelineStages = None
    remeasure: Annotated[
        bool, Option("--remeasure", help="Measure and plan again, also with --resume.")
    ] = False
    no_verify: Annotated[
        bool,
        Option(
            "--no-verify", help="Do not compare the first step with the model run without Penstock."
        ),
    ] = False
    save_weights: Annotated[
        str, Option(metavar="DIR", help="Write the trained weights there, as safetensors.")
    ] = ""

    @property
    def as_changes(self) -> list[str]:
        """The options that are given, as those of ``--set``."""
        types = {**TYPES, "fp32": "off"}
        values = {
            "steps": self.steps,
            "autocast": types.get(self.precision),
            "constraints.planner": self.planner,
            "constraints.schedule": self.schedule,
            "constraints.micro_batch_size": self.micro_batch,
            "constraints.recompute": self.recompute,
            "constraints.sharding": self.sharding,
            "constraints.state_on": self.optimizer_state,
            "constraints.max_stages": self.max_stages,
            "constraints.memory_reserve": self.memory_reserve,
            "constraints.pins": pins_with(self.pin, self.pp),
            "constraints.remeasure": self.remeasure or None,
            "verify": "off" if self.no_verify else None,
            "save_weights": os.path.abspath(self.save_weights) if self.save_weights else None,
        }
        given = {key: value for key, value in values.items() if value is not None}
        own = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())
        return [*(self.changes or ()), *own]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOptions:
    """The options that say what is to be planned."""

    profile: ProfilePath
    cluster: ClusterName
    batch: Batch
    profile_batch: ProfileBatch = None
    micro_batch: MicroBatch = None
    recompute: Recompute = "auto"
    sharding: Sharding = "auto"
    optimizer_state: OptimizerState = "device"
    optimizer: Optimizer = "adamw"
    max_stages: MaxStages = None
    memory_reserve: MemoryReserve = 0.05
    pin: Pins = None
    pp: PipelineStages = None

    @property
    def inputs(self) -> "PlanInputs":
        """The places of profile and cluster."""
        from penstock.advice.plan_files import PlanInputs

        return PlanInputs(self.profile, self.cluster, self.profile_batch)

    def problem(self, planner: str = "", schedule: str = "auto") -> "PlanningProblem":
        """The planning problem, as `planning_problem` makes it."""
        from penstock.plan.optimizer_state import optimizer_state
        from penstock.planners.problem import planning_problem

        return planning_problem(
            self.inputs.read_profile(),
            self.inputs.read_cluster(),
            self.batch,
            micro_batch_size=self.micro_batch or 0,
            planner=planner,
            schedule=schedule,
            recompute=self.recompute,
            sharding=self.sharding,
            state_on=self.optimizer_state,
            optimizer_bytes_per_parameter_byte=optimizer_state(self.optimizer),
            max_stages=self.max_stages or 0,
            memory_reserve=self.memory_reserve,
            pins=pins_with(self.pin, self.pp) or (),
        )


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: an argument that is a dataclass becomes an option for each field."""
    groups: dict[str, Any] = {}
    options: list[Parameter] = []
    for each in signature(command).parameters.values():
        if is_dataclass(kind := each.annotation):
            groups[each.name] = kind
            for field in fields(kind):
                default = Parameter.empty if field.default is MISSING else field.default
                option = Parameter(field.name, Parameter.KEYWORD_ONLY, annotation=field.type)
                options.append(option.replace(default=default))
        else:
            options.append(each.replace(kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    run.__signature__ = Signature(options)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run
