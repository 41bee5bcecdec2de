"""``penstock export`` and ``penstock import``: plans to and from other frameworks' layouts."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from typer import Argument, Option

from penstock.commands import options
from penstock.commands.terminal import Terminal
from penstock.errors import BadInput

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.advice.plan_files import PlanInputs
    from penstock.integrations.bridges.layout import PipelineLayout
    from penstock.plan.plan import Plan
    from penstock.profile.model_profile import ModelProfile
    from penstock.simulate.simulation import Prediction


def frameworks() -> list[str]:
    """The frameworks that a shell completes."""
    from penstock.integrations.bridges.formats import READERS, WRITERS

    return list(WRITERS | READERS)


Target: TypeAlias = Annotated[
    str,
    Option(
        "--to",
        metavar="FRAMEWORK",
        help="Write the layout of this framework, such as torch or megatron.",
        autocompletion=frameworks,
    ),
]
Source: TypeAlias = Annotated[
    str,
    Option(
        "--from",
        metavar="FRAMEWORK",
        help="Read the layout of this framework, such as torch or megatron.",
        autocompletion=frameworks,
    ),
]


def export_plan(
    *,
    plan: options.PlanPath,
    target: Target,
    profile: options.PlansProfile = "",
    profile_batch: options.ProfileBatch = None,
    join: Annotated[
        list[str] | None,
        Option(
            "--join",
            metavar="MODULE=LAYER",
            help="List a module that has no layer in the profile, such as a norm, right after "
            "LAYER; repeatable.",
        ),
    ] = None,
    whole_blocks: Annotated[
        bool,
        Option("--whole-blocks", help="Move cuts that are inside a block to its nearer end."),
    ] = False,
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Write PLAN as a layout of another framework; -o writes it."""
    from penstock.advice.plan_files import PlanInputs, profile_of_plan
    from penstock.files import write_text
    from penstock.integrations.bridges.formats import export_layout
    from penstock.integrations.bridges.modules import with_whole_blocks
    from penstock.plan.json_file import read_plan

    place = Path(out or "layout.json")
    if not place.name or place.suffix == ".csv":
        raise BadInput(
            f"cannot write the layout to '{place}': the order of work is written beside it as "
            f".csv; name a file such as layout.json"
        )
    if out:
        terminal.check_places(out, str(place.with_suffix(".csv")))
    given = read_plan(plan)
    costs = profile_of_plan(plan, PlanInputs(profile, "", profile_batch))
    count = given.stages[-1].layers.stop
    if count != len(costs.layers):
        raise BadInput(
            f"the plan has {count} layers, and profile '{costs.name}' has {len(costs.layers)}; "
            f"name the plan's own profile with --profile"
        )
    moved = with_whole_blocks(given, costs) if whole_blocks else given
    exported = export_layout(target, moved, costs, place, joined_modules(join or ()))
    actions = str(place.with_suffix(".csv")) if exported.actions else ""
    texts = {actions: exported.actions, out: exported.text} if out else {}
    files = [path for path in texts if path]
    for path in files:
        write_text(path, texts[path])
    layout = exported.layout
    cuts = ([stage.layers.stop for stage in each.stages] for each in (given, moved))
    moves = [f"{old} to {new}" for old, new in zip(*cuts, strict=True) if old != new]
    notes = [*exported.notes]
    if moves:
        notes.insert(0, f"cuts moved to the ends of blocks: before layer {', '.join(moves)}")
    values: dict[str, object] = {
        "to": target,
        "stages": [
            {"layers": [layers.start, layers.stop], "modules": list(modules), "rank": rank}
            for layers, modules, rank in zip(
                layout.stages, exported.stages, layout.ranks, strict=True
            )
        ],
        "schedule": layout.schedule,
        "replicas": layout.replicas,
        "micro_batches": layout.micro_batches,
        "rows": layout.rows,
        "text": exported.text,
        "files": files,
        "notes": notes,
    }
    if out:
        terminal.show(values, stage_table(layout, exported.stages))
    else:
        terminal.show_text(values, exported.text)
    for note in [*notes, *(f"wrote {path}" for path in files)]:
        terminal.note(note)
    if not out:
        terminal.note("not saved; add -o FILE")


def import_layout(
    *,
    layout: Annotated[str, Argument(metavar="FILE", help="Read this layout of another framework.")],
    source: Source,
    profile: Annotated[str, Option(metavar="P", help="Read the profile of the layout's model.")],
    profile_batch: options.ProfileBatch = None,
    cluster: Annotated[
        str, Option(metavar="C", help="Simulate the plan on this cluster, by name or TOML file.")
    ] = "",
    batch: Annotated[
        int | None, Option(min=1, metavar="N", help="Set the global batch (default: the layout's).")
    ] = None,
    micro_batch: Annotated[
        int | None,
        Option(
            min=1,
            metavar="b",
            help="Set the samples of a micro-batch, over all replicas (default: the layout's).",
        ),
    ] = None,
    schedule: Annotated[
        str, Option(metavar="NAME", help="Set the schedule (default: the layout's).")
    ] = "",
    ranks: Annotated[
        int | None, Option(min=1, metavar="R", help="Use R pipeline ranks (default: the layout's).")
    ] = None,
    replicas: Annotated[
        int | None,
        Option(min=1, metavar="D", help="Use D copies of the pipeline (default: the layout's)."),
    ] = None,
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Read another framework's layout as a plan; -o writes the plan."""
    from penstock.advice.plan_files import PlanInputs
    from penstock.integrations.bridges.formats import read_layout
    from penstock.integrations.bridges.layout import LayoutOptions, plan_of_layout
    from penstock.plan.json_file import plan_to_json, write_plan
    from penstock.plan.plan import plan_words
    from penstock.planners.problem import member_named
    from penstock.schedule.registry import FAMILIES

    if schedule:
        member_named(FAMILIES, schedule, "schedule")
    terminal.check_places(out)
    inputs = PlanInputs(profile, cluster, profile_batch)
    costs = inputs.read_profile()
    wanted = LayoutOptions(batch, micro_batch, schedule, ranks, replicas)
    read = read_layout(source, Path(layout), costs, wanted)
    plan = plan_of_layout(read, wanted)
    if cluster:
        found = show_simulated(terminal, plan, costs, inputs, out)
        if source == "device-map" and plan.micro_batches == 1:
            terminal.note(gain_words(plan, costs, inputs, found))
    else:
        if out:
            write_plan(plan, out)
        names = [[costs.layers[i].name for i in stage.layers] for stage in plan.stages]
        values = plan_to_json(plan)
        kept = ("planner", "schedule", "micro_batches", "micro_batch_size", "stages")
        shown = {key: values[key] for key in kept}
        terminal.show(shown, plan_words(plan), stage_table(read, names))
    if not read.schedule and not schedule:
        terminal.note(f"the layout names no schedule; {plan.schedule} is taken (--schedule)")
    terminal.note(f"wrote {out}" if out else "not saved; add -o plan.json")


def show_simulated(
    terminal: Terminal, plan: "Plan", costs: "ModelProfile", inputs: "PlanInputs", out: str
) -> "Prediction":
    """Show a plan that was read with its prediction, and write both to ``out``."""
    from penstock.advice.plan_files import write_planned
    from penstock.advice.what_if import play_plan
    from penstock.commands.shown_plan import show_planned, too_full_words
    from penstock.costs.schedule_costs import priced
    from penstock.planners.problem import problem_of_plan

    machines = inputs.read_cluster()
    plan = priced(problem_of_plan(plan, costs, machines), plan)
    planned = play_plan(plan, costs, machines).planned
    if out:
        write_planned(planned, out, inputs, 0.0)
    show_planned(terminal, planned, costs, machines, planned.to_json(0.0))
    if planned.prediction.too_full:
        terminal.note(too_full_words(planned.prediction.too_full))
    return planned.prediction


def gain_words(
    plan: "Plan", costs: "ModelProfile", inputs: "PlanInputs", found: "Prediction"
) -> str:
    """The gain of the stages of a device map from micro-batches; ``found`` is without them."""
    from penstock.advice.what_if import in_micro_batches
    from penstock.planners.problem import problem_of_plan
    from penstock.simulate.score import make_score
    from penstock.text import counted, seconds_text

    problem = problem_of_plan(plan, costs, inputs.read_cluster())
    score = make_score(problem)
    whole_s = found.iteration_s if found.fits else inf
    best = in_micro_batches(problem, plan, score)
    best_s = score(best)
    if best_s >= whole_s:
        return "one device works at a time, and smaller micro-batches would not make it faster"
    many = counted(best.micro_batches, "micro-batch")
    gain = f", {whole_s / best_s:.2g} times as fast" if whole_s < inf else " and fit"
    return (
        f"one device works at a time; the same stages with {many} under {best.schedule} would take "
        f"{seconds_text(best_s)}{gain}; penstock plan looks for better ones"
    )


def joined_modules(texts: Sequence[str]) -> dict[str, str]:
    """The modules of ``--join``, each with the layer that it follows."""
    found: dict[str, str] = {}
    for text in texts:
        module, equals, layer = text.partition("=")
        if not (module and equals and layer) or module in found:
            raise BadInput(
                f"--join '{text}' is not of the form MODULE=LAYER with a module that is named "
                f"once, for example --join norm=layers.7"
            )
        found[module] = layer
    return found


def stage_table(layout: "PipelineLayout", names: Sequence[Sequence[str]]) -> "Table":
    """One row for each stage: its rank, and its modules or layers."""
    from penstock.report.tables import plain_table
    from penstock.text import layers_text

    table = plain_table(("stage", "rank", "layers"))
    for index, (layers, modules) in enumerate(zip(layout.stages, names, strict=True)):
        text = f"{layers_text(modules)}  [{layers.start}, {layers.stop})"
        table.add_row(str(index), str(layout.ranks[index]), text)
    return table
