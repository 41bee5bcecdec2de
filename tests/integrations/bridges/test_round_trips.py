"""A plan that is written for another framework and read back is the same layout."""

import csv
import io
import json
import tomllib
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from penstock.errors import BadInput
from penstock.integrations.bridges.formats import Exported, export_layout, read_layout
from penstock.integrations.bridges.layout import LayoutOptions, layout_of_plan, plan_of_layout
from penstock.integrations.bridges.modules import with_whole_blocks
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    ModelProfile,
    TensorParallelCosts,
)
from penstock.schedule.shape import folded, looped

LOOPED = ("interleaved", "breadth-first")
FOLDED = ("zb-v", "hanayo", "dualpipe-v", "v-half")
STRAIGHT = ("1f1b", "gpipe", "zb-h1", "zb-h2", "early-backward", "wavefront")


def profile_of(blocks: int, parts: tuple[str, ...], seconds: float = 1.0) -> ModelProfile:
    """An embedding, blocks of these parts, a head and the loss."""
    names = ["model.embed"]
    for block in range(blocks):
        names += [f"model.layers.{block}{part}" for part in parts]
    names += ["lm_head", "loss"]
    cost = Affine(0.0, seconds)
    layers = tuple(LayerCost(name, cost, cost, cost) for name in names)
    edges = tuple(
        Edge(i, i + 1, f"hidden.{i}", Affine(0.0, 8.0), Affine(0.0, 8.0))
        for i in range(len(layers) - 1)
    )
    return ModelProfile("model", layers, edges)


@st.composite
def layouts(draw: st.DrawFn, styles: tuple[str, ...]) -> tuple[ModelProfile, Plan]:
    """A profile, and a plan with cuts between blocks, equal replicas and shuffled devices."""
    style = draw(st.sampled_from(styles))
    size = draw(st.integers(2 if style != "straight" else 1, 4))
    rounds = 1 if style == "straight" else 2
    stages = size * rounds
    parts = draw(st.sampled_from([("",), (".attn", ".mlp")]))
    blocks = draw(st.integers(max(stages, 1), 12))
    profile = profile_of(blocks, parts)
    ends = draw(st.permutations(range(blocks + 1)))[: stages - 1]
    bounds = [0, *(1 + len(parts) * end for end in sorted(ends)), len(profile.layers)]
    replicas, rows = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shuffled = draw(st.permutations(range(size * replicas)))
    groups = [tuple(shuffled[r * replicas : (r + 1) * replicas]) for r in range(size)]
    families = {"straight": STRAIGHT, "looped": LOOPED, "folded": FOLDED}[style]
    placement = folded(size, 2) if style == "folded" else looped(size, rounds)
    plan = Plan(
        tuple(
            Stage(range(lo, hi), groups[rank], (rows,) * replicas, draw(st.booleans()))
            for lo, hi, rank in zip(bounds[:-1], bounds[1:], placement, strict=True)
        ),
        micro_batches=size * draw(st.integers(2, 3)),
        micro_batch_size=rows * replicas,
        schedule=draw(st.sampled_from(families)),
    )
    return profile, plan


def written_and_read(
    framework: str, ending: str, profile: ModelProfile, plan: Plan, asked: LayoutOptions
) -> tuple[Exported, Plan]:
    """The exported layout and the plan that is read from it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"layout{ending}"
        exported = export_layout(framework, plan, profile, path, {})
        path.write_text(exported.text, encoding="utf-8")
        if exported.actions:
            path.with_suffix(".csv").write_text(exported.actions, encoding="utf-8")
        read = read_layout(framework, path, profile, asked)
    return exported, plan_of_layout(read, asked)


STYLES = {
    "torch": ("straight", "looped", "folded"),
    "megatron": ("straight", "looped"),
}


@pytest.mark.parametrize(("framework", "ending"), [("torch", ".json"), ("megatron", ".txt")])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_written_is_read_back(framework: str, ending: str, data: st.DataObject) -> None:
    profile, plan = data.draw(layouts(STYLES[framework]))
    # Megatron's arguments say neither the schedule nor how many copies of the pipeline there are.
    silent = framework == "megatron"
    asked = LayoutOptions(
        schedule=plan.schedule if silent else "", replicas=plan.stages[0].replicas if silent else 0
    )
    _, back = written_and_read(framework, ending, profile, plan, asked)
    assert layout_of_plan(back, framework) == layout_of_plan(plan, framework)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_an_order_without_a_name_is_recognised(data: st.DataObject) -> None:
    """Some schedules have the same order; any of them will do."""
    profile, plan = data.draw(layouts(STYLES["torch"]))
    plan = replace(plan, stages=tuple(replace(stage, recompute=False) for stage in plan.stages))
    exported = export_layout("torch", plan, profile, Path("layout.json"), {})
    nameless = {**json.loads(exported.text), "schedule": ""}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "layout.json"
        path.write_text(json.dumps(nameless), encoding="utf-8")
        path.with_suffix(".csv").write_text(exported.actions, encoding="utf-8")
        read = read_layout("torch", path, profile, LayoutOptions())
    back = plan_of_layout(read, LayoutOptions())
    assert [*map(list, order_of(back).orders)] == [*map(list, order_of(plan).orders)]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_torch_accepts_the_actions_and_finds_the_ranks(data: st.DataObject) -> None:
    """Torch's own check of a schedule, and its own pass that adds the messages."""
    profile, plan = data.draw(layouts(STYLES["torch"]))
    exported, _ = written_and_read("torch", ".json", profile, plan, LayoutOptions())
    rows = csv.reader(io.StringIO(exported.actions))
    actions = {r: [torch_schedules._Action.from_str(c) for c in row] for r, row in enumerate(rows)}
    places = torch_schedules._validate_schedule(
        actions, len(actions), len(plan.stages), plan.micro_batches
    )
    assert tuple(places[stage] for stage in range(len(plan.stages))) == exported.layout.ranks
    done = {rank: [str(action) for action in order] for rank, order in actions.items()}
    full = torch_schedules._add_send_recv(actions, places.__getitem__, len(plan.stages))
    assert {r: [str(a) for a in o if a.is_compute_op] for r, o in full.items()} == done


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_cuts_move_to_the_nearest_ends_of_blocks(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(4, 10))
    profile = profile_of(blocks, (".attn", ".mlp"))
    plan = data.draw(two_stage_plans(len(profile.layers)))
    moved = with_whole_blocks(plan, profile)
    (cut,), (now,) = ([s.layers.stop for s in p.stages[:-1]] for p in (plan, moved))
    assert now in (cut - 1, cut) and profile.layers[now].name.endswith((".attn", "head"))
    export_layout("megatron", moved, profile, Path("layout.txt"), {})
    assert with_whole_blocks(moved, profile) is moved


@st.composite
def two_stage_plans(draw: st.DrawFn, layers: int) -> Plan:
    cut = draw(st.integers(1, layers - 2))
    return Plan(
        (Stage(range(cut), (0,), (1,)), Stage(range(cut, layers), (1,), (1,))), 2, 1, "1f1b"
    )


def test_the_written_forms_are_those_of_the_frameworks() -> None:
    """By hand: eight blocks, three stages on three ranks, two copies."""
    profile = profile_of(8, ("",))
    bounds = (0, 4, 7, 11)
    stages = tuple(
        Stage(range(bounds[s], bounds[s + 1]), (2 * s, 2 * s + 1), (2, 2)) for s in range(3)
    )
    plan = Plan(stages, 4, 4, "1f1b")
    names = [
        ["model.embed", *(f"model.layers.{i}" for i in range(3))],
        [f"model.layers.{i}" for i in range(3, 6)],
        ["model.layers.6", "model.layers.7", "model.norm", "lm_head"],
    ]
    given = (plan, profile, Path("a.toml"), {"model.norm": "model.layers.7"})
    titan = export_layout("torchtitan", *given)
    assert tomllib.loads(titan.text) == {
        "parallelism": {
            "pipeline_parallel_degree": 3,
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_schedule_csv": "a.csv",
            "num_pp_microbatches": 4,
            "data_parallel_replicate_degree": 2,
            "module_fqns_per_model_part": names,
        },
        "training": {"local_batch_size": 8},
    }
    assert titan.actions.splitlines()[2] == "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3"
    assert export_layout("megatron", *given).text == (
        "--num-layers 8\n--pipeline-model-parallel-size 3\n"
        "--pipeline-model-parallel-layout 'Et*3|t*3|t*2L'\n"
        "--micro-batch-size 2\n--global-batch-size 16\n"
    )
    deepspeed = json.loads(export_layout("deepspeed", *given).text)
    assert deepspeed["parts"] == [0, 4, 7, 11] and deepspeed["layers"] == [
        *chain.from_iterable(names)
    ]
    assert (deepspeed["train_batch_size"], deepspeed["num_dp"]) == (16, 2)
    torch = json.loads(export_layout("torch", *given).text)
    assert torch["split_points"] == ["model.layers.3", "model.layers.6"]
    assert torch["stages"] == names


def test_light_entries_of_a_sequential_are_counted() -> None:
    """Entries without heavy work have no layer, but their number."""
    cost = Affine(0.0, 1.0)
    layers = tuple(LayerCost(name, cost, cost, cost) for name in ("1", "3", "4", "7", "loss"))
    profile = ModelProfile("sequential", layers)
    plan = Plan((Stage(range(2), (0,), (1,)), Stage(range(2, 5), (1,), (1,))), 2, 1, "1f1b")
    exported = export_layout("deepspeed", plan, profile, Path("layout.json"), {})
    assert json.loads(exported.text)["parts"] == [0, 4, 8]


@pytest.mark.parametrize("experts", [False, True])
def test_degrees_of_tensor_groups_and_their_experts_are_written(experts: bool) -> None:
    layers = 11
    none = (0.0,) * layers
    costs = TensorParallelCosts(none, none, none, experts=experts)
    profile = replace(profile_of(8, ("",)), tensor_parallel=costs)
    stages = Stage(range(5), (0,), (2,)), Stage(range(5, layers), (1,), (2,))
    plan = Plan(stages, 4, 2, "1f1b", tensor_groups=((0, 1, 2, 3), (4, 5, 6, 7)))
    given = (profile, Path("a.toml"), {})
    titan = export_layout("torchtitan", plan, *given)
    degrees = tomllib.loads(titan.text)["parallelism"]
    assert degrees["tensor_parallel_degree"] == 4
    assert degrees.get("expert_parallel_degree", 1) == (4 if experts else 1)
    assert "each pipeline rank is a tensor group of 4 ranks" in titan.notes[-1]
    megatron = export_layout("megatron", plan, *given).text.splitlines()
    assert "--tensor-model-parallel-size 4" in megatron
    assert ("--expert-model-parallel-size 4" in megatron) == experts
    unequal = replace(plan, tensor_groups=((0, 1, 2, 3), (4, 5)))
    with pytest.raises(BadInput, match=r"has tensor groups of \[2, 4\] ranks; torchtitan has grou"):
        export_layout("torchtitan", unequal, *given)
