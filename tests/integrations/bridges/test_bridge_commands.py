"""`penstock export` and `penstock import`: their output, and one line for each thing refused."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from commands.refusals import Penstock, refused

from penstock.plan.json_file import plan_to_json, read_plan, write_plan
from penstock.plan.plan import Plan, Stage
from penstock.profile.json_file import write_profile
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile, SharedParameter

SECOND = Affine(0.001, 0.001)
NAMES = ("wte", *(f"h.{i}.{part}" for i in range(6) for part in ("attn", "mlp")), "head", "loss")


def profile_named(*names: str, shared: tuple[int, ...] = (), skip: int = 0) -> ModelProfile:
    """Layers of equal cost; the first one's tensor is also read ``skip`` layers later."""
    edges = [(i, i + 1) for i in range(len(names) - 1)] + ([(0, skip)] if skip else [])
    size = Affine(0.0, 1000.0)
    return ModelProfile(
        "model",
        tuple(LayerCost(name, SECOND, SECOND, SECOND, 1000) for name in names),
        tuple(Edge(a, b, f"t{a}", size, size) for a, b in edges),
        (SharedParameter("wte.weight", 1000, shared),) if shared else (),
        batch_size=4,
    )


def plan_at(*cuts: int, schedule: str = "1f1b", layers: int = len(NAMES)) -> Plan:
    bounds = [0, *cuts, layers]
    stages = tuple(Stage(range(lo, hi), (s,), (2,)) for s, (lo, hi) in enumerate(pairwise(bounds)))
    return Plan(stages, 8, 2, schedule)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as a run leaves it: a plan of three stages, and the profile beside it."""
    write_plan(plan_at(5, 9), tmp_path / "plan.json")
    write_profile(profile_named(*NAMES), tmp_path / "profile.json")
    return tmp_path


def written(place: Path, text: object, name: str = "layout.json") -> Path:
    path = place / name
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return path


def imported(penstock: Penstock, path: Path, source: str, *options: object) -> Any:
    profile = ("--profile", path.parent / "profile.json")
    return penstock("import", path, "--from", source, *profile, *options)


def test_an_export_finds_the_profile_and_writes_both_files(penstock: Penstock, place: Path) -> None:
    out = place / "layout.json"
    values = penstock("export", place / "plan.json", "--to", "torch", "-o", out, "--json").values
    assert values["files"] == [str(place / "layout.csv"), str(out)]
    assert values["text"] == out.read_text()
    assert [stage["rank"] for stage in values["stages"]] == [0, 1, 2]
    assert values["stages"][1] == {"layers": [5, 9], "modules": ["h.2", "h.3"], "rank": 1}
    assert (values["to"], values["schedule"]) == ("torch", "1f1b")
    assert (values["replicas"], values["micro_batches"], values["rows"]) == (1, 8, 2)
    back = imported(penstock, out, "torch", "--json").values
    plan = plan_to_json(read_plan(place / "plan.json"))
    assert back == {key: plan[key] for key in back}
    assert {"stages", "schedule", "micro_batches", "micro_batch_size"} <= set(back)


def test_without_a_place_the_layout_is_printed(penstock: Penstock, place: Path) -> None:
    answer = penstock("export", place / "plan.json", "--to", "megatron")
    assert "--pipeline-model-parallel-layout 'Et*2|t*2|t*2L'\n" in answer.output
    assert answer.errors == "not saved; add -o FILE\n"
    assert penstock("export", place / "plan.json", "--to", "megatron", "--quiet").errors == ""


def test_an_import_on_a_cluster_is_simulated_and_can_be_simulated_again(
    penstock: Penstock, place: Path
) -> None:
    layout = written(place, "Et|ttt|t*2L", "layout.txt")
    options = ("--batch", 16, "--micro-batch", 2, "--cluster", "dapple-c", "--json")
    values = imported(penstock, layout, "megatron", *options, "-o", place / "theirs.json").values
    assert [stage["layers"] for stage in values["stages"]] == [[0, 3], [3, 9], [9, 15]]
    again = penstock("simulate", place / "theirs.json", "--json").values
    assert again["iteration_s"] == values["iteration_s"] > 0
    ours = ("--profile", place / "profile.json", "--cluster", "dapple-c", "--json")
    assert penstock("simulate", place / "plan.json", *ours).values["iteration_s"] > 0


def test_cuts_inside_blocks_are_refused_or_moved(penstock: Penstock, place: Path) -> None:
    write_plan(plan_at(4, 9), place / "plan.json")
    for target in ("torch", "torchtitan", "megatron", "deepspeed"):
        answer = penstock("export", place / "plan.json", "--to", target)
        refused(answer, 2, "layer 4", "'h.1'", "--whole-blocks", 'granularity = "block"')
    moved = penstock("export", place / "plan.json", "--to", "megatron", "--whole-blocks", "--json")
    assert "'Et|t*3|t*2L'" in moved.values["text"]
    assert moved.values["notes"] == ["cuts moved to the ends of blocks: before layer 4 to 3"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (replace(plan_at(5, 9), schedule="2bw"), ("trains without a flush", "--schedule 1f1b")),
        (plan_at(3, 7, 11, schedule="chimera"), ("every stage on two devices", "zb-v")),
        (replace(plan_at(5, 9), schedule="none"), ("'none' is unknown",)),
        (plan_at(5, 14), ("stage 2 holds only the loss", "'head'")),
        (plan_at(5, 9, layers=16), ("the plan has 16 layers", "has 15", "--profile")),
        (
            Plan((Stage(range(5), (0, 1), (1, 1)), Stage(range(5, 15), (2,), (2,))), 8, 2, "1f1b"),
            ("stages 0 and 1 have 2 and 1 replicas", "--planner gpipe"),
        ),
        (
            Plan(
                (Stage(range(5), (0, 1), (2, 1)), Stage(range(5, 15), (2, 3), (2, 1))), 8, 3, "1f1b"
            ),
            ("take [2, 1] rows", "make them equal"),
        ),
    ],
)
def test_what_no_framework_has_is_refused(
    penstock: Penstock, place: Path, changed: Plan, told: tuple[str, ...]
) -> None:
    write_plan(changed, place / "plan.json")
    for target in ("torch", "torchtitan", "megatron", "deepspeed"):
        refused(penstock("export", place / "plan.json", "--to", target), 2, *told)


@pytest.mark.parametrize(
    ("target", "cuts", "schedule", "told"),
    [
        ("megatron", (3, 5, 7), "zb-v", ("ranks [0, 1, 1, 0]", "interleaved")),
        ("deepspeed", (3, 5, 7), "zb-v", ("4 stages on 2 ranks", "--schedule 1f1b")),
        ("torchtitan", (3, 5, 7, 9, 11), "hanayo", ("ranks [0, 1, 1, 0, 0, 1]", "zb-v")),
        ("torch", (5, 9), "fbp-as", ("runs forwards beside backwards",)),
    ],
)
def test_what_one_framework_lacks_is_refused(
    penstock: Penstock, place: Path, target: str, cuts: tuple[int, ...], schedule: str, told: Any
) -> None:
    plan = plan_at(*cuts)
    devices = {4: (0, 1, 1, 0), 6: (0, 1, 1, 0, 0, 1), 3: (0, 1, 2)}[len(plan.stages)]
    stages = tuple(
        replace(stage, devices=(device,))
        for stage, device in zip(plan.stages, devices, strict=True)
    )
    write_plan(replace(plan, stages=stages, schedule=schedule), place / "plan.json")
    refused(penstock("export", place / "plan.json", "--to", target), 2, *told)


@pytest.mark.parametrize(
    ("profile", "told"),
    [
        (profile_named(*NAMES, shared=(0, 13)), ("'wte.weight' is tied", "stages 0 and 2")),
        (profile_named(*NAMES, skip=12), ("stage 2 reads tensor 't0' of stage 0",)),
        (profile_named(*NAMES[:6], "forward", *NAMES[7:]), ("layer 6", "own forward")),
        (profile_named(*NAMES[:6], "3 layer", *NAMES[7:]), ("'3 layer'", "penstock profile")),
        (profile_named("head", *NAMES[1:]), ("'head' is called on stages 0 and 2",)),
    ],
)
def test_what_torch_cannot_run_is_refused(
    penstock: Penstock, place: Path, profile: ModelProfile, told: tuple[str, ...]
) -> None:
    write_profile(profile, place / "profile.json")
    for target in ("torch", "torchtitan"):
        refused(penstock("export", place / "plan.json", "--to", target), 2, *told)


def test_a_parameter_that_is_tied_within_a_stage_hinders_nothing(
    penstock: Penstock, place: Path
) -> None:
    write_profile(profile_named(*NAMES, shared=(0, 3)), place / "profile.json")
    for target in ("torch", "torchtitan"):
        answer = penstock("export", place / "plan.json", "--to", target, "--quiet")
        assert (answer.code, answer.errors) == (0, "")


def test_deepspeed_is_told_which_layers_are_tied(penstock: Penstock, place: Path) -> None:
    own = penstock("export", place / "plan.json", "--to", "deepspeed")
    assert "tied" not in own.output + own.errors
    write_profile(profile_named(*NAMES, shared=(0, 13)), place / "profile.json")
    tied = penstock("export", place / "plan.json", "--to", "deepspeed")
    assert "'wte.weight' is tied" in tied.output + tied.errors


def test_megatron_needs_one_list_of_blocks_and_whole_ends(penstock: Penstock, place: Path) -> None:
    plan = place / "plan.json"
    two = profile_named("wte", *(f"{part}.{i}" for part in "ab" for i in range(6)), "head", "loss")
    write_profile(two, place / "profile.json")
    refused(penstock("export", plan, "--to", "megatron"), 2, "blocks in 'a', 'b'")
    write_profile(profile_named(*map(str, range(15))), place / "profile.json")
    refused(penstock("export", plan, "--to", "megatron"), 2, "no numbered blocks")
    ends = profile_named("wte", "norm", *(f"h.{i}" for i in range(10)), "pool", "head", "loss")
    write_profile(ends, place / "profile.json")
    for cuts, what in (((1, 5), "embedding"), ((5, 13), "head")):
        write_plan(plan_at(*cuts), plan)
        refused(penstock("export", plan, "--to", "megatron"), 2, "keeps together as its", what)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--to", "megatron", "-o", "layout.csv"), ("layout.csv", "layout.json")),
        (("--to", "torchtitan", "--join", "norm"), ("'norm'", "MODULE=LAYER")),
        (("--to", "torchtitan", "--join", "norm=h.9"), ("'norm' is to join 'h.9'", "wte")),
        (("--to", "jax"), ("jax", "torchtitan")),
        (("--to", "torch", "--profile", "none.json"), ("none.json' does not exist",)),
        (("--to", "torch", "-o", "missing/layout.json"), ("folder 'missing' does not exist",)),
    ],
)
def test_wrong_options_of_an_export(
    penstock: Penstock, place: Path, options: tuple[str, ...], told: tuple[str, ...]
) -> None:
    refused(penstock("export", place / "plan.json", *options), 2, *told)


def test_a_plan_without_a_profile_is_told_so(penstock: Penstock, place: Path) -> None:
    (place / "profile.json").unlink()
    answer = penstock("export", place / "plan.json", "--to", "torch")
    refused(answer, 2, "does not say which profile", "--profile")


BATCH = ("--batch", 16, "--micro-batch", 2)


@pytest.mark.parametrize(
    ("source", "text", "told"),
    [
        ("torch", {"split_points": ["h.9"]}, ("no module 'h.9'", "did you mean 'h.")),
        ("torch", {"split_points": ["h.3", "h.2"]}, ("'h.2'", "model's order")),
        ("torch", {"split_points": ["wte"]}, ("'wte'", "without the first")),
        ("torch", {"split_point": ["h.3"]}, ("did you mean 'split_points'?",)),
        ("torch", {"split_points": ["h.3"], "stage_to_rank": [0, 2]}, ("stage_to_rank",)),
        ("torch", {"split_points": ["h.3"], "stage_to_rank": [0, 2**62]}, ("stage_to_rank",)),
        (
            "torch",
            {"split_points": ["h.3"], "data_parallel_size": 10**9, "microbatch_size": 2},
            ("1000000000 copies", "65536 devices"),
        ),
        ("torch", {"split_points": ["h.3"], "schedule_csv": "no.csv"}, ("no.csv",)),
        ("megatron", "Et*3|t*2L", ("5 transformer layers", "6 blocks", "another model")),
        ("megatron", "Et*3|t*3x", ("letter 'x'",)),
        ("megatron", "Et*3|t*2mtL", ("'m'", "multi-token")),
        ("megatron", "t*3|Et*3L", ("begins with its only E",)),
        ("megatron", "Et*3||t*3L", ("stage 1 of the layout is empty",)),
        ("megatron", "E(t*3", ("letter '('",)),
        ("megatron", "Et*999999999|tL", ("more than 100000 letters",)),
        ("megatron", "--micro-batch-size 2", ("no --pipeline-model-parallel-layout",)),
        ("megatron", "--num-layers 'x", ("no list of arguments",)),
        (
            "megatron",
            "--pipeline-model-parallel-layout Et*3|t*3L --pipeline-model-parallel-size 3",
            ("2 stages cannot be divided among 3 ranks",),
        ),
        (
            "megatron",
            "--pipeline-model-parallel-layout Et*3|t*3L --num-layers 8",
            ("--num-layers has 8", "6 blocks"),
        ),
        (
            "megatron",
            "--pipeline-model-parallel-layout Et*3|t*3L --micro-batch-size=0",
            ("--micro-batch-size is '0'",),
        ),
        ("deepspeed", [0, 3, 8], ("layouts of 'deepspeed' are not read", "torch, megatron")),
        ("huggingface", {}, ("layouts of 'huggingface' are not read", "torch, megatron")),
    ],
)
def test_wrong_layouts_are_refused(
    penstock: Penstock, place: Path, source: str, text: object, told: tuple[str, ...]
) -> None:
    batch = ("--batch", 2 * 10**9) if "data_parallel_size" in str(text) else BATCH
    refused(imported(penstock, written(place, text), source, *batch), 2, *told)


@pytest.mark.parametrize(
    ("actions", "told"),
    [
        ("0F0,0X0\n1F0,1B0\n", ("line 1", "'0X0'")),
        ("0F0,0B0\n\n", ("rank without actions",)),
        ("0F0,0B0\n2F0,2B0\n", ("actions of stages [0, 2]", "2 stages")),
        ("0F0,0B0,1F0\n1B0\n", ("stage 1 are on ranks 0 and 1",)),
        ("0F0,0B0\n1F0,1B0,1F1,1B1\n", ("layout.csv",)),
        ("0B0,0F0\n1F0,1B0\n", ("layout.csv",)),
        ("0F100000000,0B0\n1F0,1B0\n", ("micro-batch 100000000", "65535")),
        (
            "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0\n",
            ("order", "none of our schedules", "--schedule"),
        ),
    ],
)
def test_wrong_actions_are_refused(
    penstock: Penstock, place: Path, actions: str, told: tuple[str, ...]
) -> None:
    written(place, actions, "layout.csv")
    layout = written(place, {"split_points": ["h.3"], "schedule_csv": "layout.csv"})
    refused(imported(penstock, layout, "torch", "--micro-batch", 2), 2, *told)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), ("does not say how many micro-batches", "--batch", "--micro-batch")),
        (("--batch", 16), ("does not say how many micro-batches",)),
        (("--batch", 15, "--micro-batch", 2), ("15 samples is no multiple",)),
        (("--batch", 16, "--micro-batch", 2, "--replicas", 4), ("divided among 4 replicas",)),
        (("--batch", 16, "--micro-batch", 2, "--schedule", "1f1"), ("did you mean '1f1b'?",)),
        (("--batch", 16, "--micro-batch", 2, "--cluster", "dapple"), ("dapple",)),
    ],
)
def test_wrong_options_of_an_import(
    penstock: Penstock, place: Path, options: tuple[object, ...], told: tuple[str, ...]
) -> None:
    refused(imported(penstock, written(place, "Et*3|t*3L"), "megatron", *options), 2, *told)


def test_layouts_by_hand_are_read(penstock: Penstock, place: Path) -> None:
    batch = ("--batch", 16, "--micro-batch", 2, "--json")
    cases: list[tuple[str, object, tuple[object, ...], list[list[int]], str]] = [
        ("torch", {"split_points": ["h.2"]}, (), [[0, 5], [5, 15]], "1f1b"),
        ("torch", {"split_points": ["h.1.mlp", "head"]}, (), [[0, 4], [4, 13], [13, 15]], "1f1b"),
        (
            "megatron",
            "Et,(t|)*4,t|L",
            ("--ranks", 2),
            [[0, 5], [5, 7], [7, 9], [9, 11], [11, 13], [13, 15]],
            "interleaved",
        ),
    ]
    for source, text, options, stages, schedule in cases:
        values = imported(penstock, written(place, text), source, *batch, *options).values
        assert [stage["layers"] for stage in values["stages"]] == stages, source
        assert (values["schedule"], values["micro_batches"]) == (schedule, 8), source


def test_actions_of_torchs_runtime_with_messages_are_read(penstock: Penstock, place: Path) -> None:
    """Cells for messages, sharding and waits are left out; an overlapped pair is two actions."""
    written(
        place,
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
        "1UNSHARD,,1RECV_F0,1F0,(1B0;1F1)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1\n",
        "layout.csv",
    )
    layout = written(place, {"split_points": ["h.3"], "schedule_csv": "layout.csv"})
    values = imported(penstock, layout, "torch", "--micro-batch", 2, "--json").values
    assert values["schedule"] in ("1f1b", "early-backward", "wavefront")
    assert values["micro_batches"] == 2


def device_map(*cuts: int) -> dict[str, object]:
    """The layers' modules on one device after another, as Accelerate divides them."""
    modules = ["wte", *(f"h.{i}" for i in range(6)), "head"]
    bounds = [0, *cuts, len(modules)]
    devices = [n for n, (lo, hi) in enumerate(pairwise(bounds)) for _ in range(lo, hi)]
    return dict(zip(modules, devices, strict=True))


def test_a_device_map_is_one_micro_batch_and_a_pipeline_of_its_stages_is_faster(
    penstock: Penstock, place: Path
) -> None:
    path = written(place, device_map(4))
    options = ("--batch", 16, "--cluster", "dapple-c")
    values = imported(penstock, path, "device-map", *options, "--json").values
    assert [stage["layers"] for stage in values["stages"]] == [[0, 7], [7, 15]]
    assert (values["micro_batches"], values["micro_batch_size"]) == (1, 16)
    told = imported(penstock, path, "device-map", *options).errors
    (line,) = (line for line in told.splitlines() if line.startswith("one device works at a time"))
    many, schedule, gain = re.findall(r"with (\d+) micro-.* under (\S+) .*, (\S+) times", line)[0]
    sizes = ("--micro-batch", 16 // int(many), "--schedule", schedule)
    faster = imported(penstock, path, "device-map", *options, *sizes, "--json").values
    ratio = values["iteration_s"] / faster["iteration_s"]
    assert ratio == pytest.approx(float(gain), rel=0.05) and 1.2 < ratio < 2


def test_a_tied_head_may_be_on_the_device_of_its_embedding(penstock: Penstock, place: Path) -> None:
    tied = {**device_map(4), "head": "cuda:0", "h.5.mlp": 0}
    values = imported(penstock, written(place, tied), "device-map", "--batch", 16, "--json").values
    assert [(s["layers"], s["devices"]) for s in values["stages"]] == [
        ([0, 7], [0]),
        ([7, 12], [1]),
        ([12, 15], [0]),
    ]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({}, "is no table of modules"),
        ({"h": 0}, "no device for layer 'wte'"),
        ({"": 0, "h.3": "cpu"}, "'h.3' on 'cpu'; a stage keeps its weights on its device"),
        ({"": True}, "give the number of one"),
    ],
)
def test_device_maps_that_are_no_pipeline_are_refused(
    penstock: Penstock, place: Path, document: dict[str, object], told: str
) -> None:
    refused(imported(penstock, written(place, document), "device-map", "--batch", 16), 2, told)
