"""Arguments and options that several commands share."""

from typing import Annotated, Literal, TypeAlias

from typer import Argument, Option

__all__ = [
    "AsJson",
    "Batch",
    "ClusterName",
    "Device",
    "JobName",
    "MaxStages",
    "MemoryReserve",
    "MicroBatch",
    "Out",
    "PlanPath",
    "ProfileBatch",
    "ProfilePath",
    "Quiet",
    "Recompute",
    "ScheduleNames",
    "Workers",
]

AsJson: TypeAlias = Annotated[
    bool, Option("--json", help="Print one JSON object and nothing else (SI units).")
]
Quiet: TypeAlias = Annotated[bool, Option("--quiet", help="No progress and no notes.")]
Out: TypeAlias = Annotated[
    str, Option("-o", "--out", metavar="PATH", help="Where to write the result.")
]
JobName: TypeAlias = Annotated[
    str, Argument(metavar="JOB", help="A built-in job ('penstock list') or a TOML file.")
]
ProfilePath: TypeAlias = Annotated[
    str,
    Argument(
        metavar="PROFILE",
        help="A built-in model ('penstock list'), our JSON, PipeDream text (.txt) or Piper JSON.",
    ),
]
PlanPath: TypeAlias = Annotated[str, Argument(metavar="PLAN", help="A plan.json.")]
ProfileBatch: TypeAlias = Annotated[
    int, Option(min=0, metavar="B", help="Samples that a PipeDream text was profiled with.")
]
ClusterName: TypeAlias = Annotated[
    str, Option(metavar="C", help="A preset ('penstock list') or a TOML file.")
]
Batch: TypeAlias = Annotated[int, Option(metavar="N", help="Samples of one iteration.")]
MicroBatch: TypeAlias = Annotated[
    int, Option(min=0, metavar="b", help="Samples of a micro-batch (0: the best divisor of N).")
]
MaxStages: TypeAlias = Annotated[
    int, Option(min=0, metavar="S", help="At most so many stages (0: any number).")
]
MemoryReserve: TypeAlias = Annotated[
    float,
    Option(metavar="R", help="The share of each device's memory that plans leave free."),
]
Recompute: TypeAlias = Annotated[
    Literal["auto", "on", "off"], Option(help="Compute activations again to save memory.")
]
ScheduleNames: TypeAlias = Annotated[
    str,
    Option(
        "--schedule",
        "--schedules",
        metavar="x,y",
        help="Schedules of 'penstock list' to choose from, auto, whole-backwards, or any (of all).",
    ),
]
Device: TypeAlias = Annotated[Literal["cpu", "cuda"], Option(help="Where the layers run.")]
Workers: TypeAlias = Annotated[int, Option(min=1, metavar="N", help="Worker processes.")]
