"""Profiles on disk in every format, and what is said of wrong ones."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from planning_strategies import profiles

from penstock.errors import BadInput
from penstock.profile.find import read_any_profile
from penstock.profile.json_file import profile_from_json, read_profile, write_profile
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile, SharedParameter

PIPEDREAM = """\
node3 -- Add -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size=0.0
node1 -- Input -- forward_compute_time=17.0, backward_compute_time=0.0, activation_size=400.0, parameter_size=0
node2 -- Conv(3, 8, kernel=(3, 3)) -- forward_compute_time=4.0, backward_compute_time=6.0, activation_size=[80; 40], parameter_size=20.000 -- stage_id=1
\tnode2 -- node3
\tnode1 -- node2
\tnode1 -- node3
"""  # noqa: E501

PIPER = {
    "maxDevices": 2,
    "nodes": [
        {
            "id": 7,
            "name": "Layer",
            "TMPCs": {
                "1": [
                    {
                        "id": "vanilla",
                        "timePerSample": 0.03,
                        "parameterSize": 10.0,
                        "memoryUsageA": 5.0,
                        "memoryUsageB": 25.0,
                        "syncTimeFw": {},
                    }
                ]
            },
        },
    ],
    "edges": [],
}

PUBLISHED = Path(__file__).parents[3] / "shared" / "profiles"
BATCHES = {"gnmt": 64, "inception_v3": 128, "resnet50": 128, "vgg16": 128}


@settings(max_examples=50, deadline=None)
@given(profiles())
def test_every_profile_survives_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, profile: ModelProfile
):
    path = tmp_path_factory.mktemp("profiles") / "p.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert read_any_profile(path) == profile


def document(tmp_path: Path) -> str:
    layer = LayerCost("first", Affine(0.5, 0.25), Affine(0, 1), Affine(0, 1), 3)
    edge = Edge(0, 1, "t", Affine(0, 4), Affine(0, 4))
    shared = SharedParameter("tied", 8, (0, 1))
    profile = ModelProfile("two", (layer, layer), (edge,), (shared,), batch_size=4)
    write_profile(profile, tmp_path / "p.json")
    return (tmp_path / "p.json").read_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"forward_s"', '"foward_s"', ["layers[0]", "did you mean 'forward_s'"]),
        ('"fixed": 0.5', '"fixed": -5', ["layer 0 ('first')", "forward_s", "-4.75", ">= 0"]),
        ('"fixed": 0.5', '"fixed": NaN', ["layer 0 ('first')", "nan", "finite"]),
        ('"fixed": 0.5', '"fixed": "fast"', ["layers[0].forward_s.fixed", "fast", "number"]),
        ('"producer": 0', '"producer": 1', ["'t'", "layer 1 to layer 1", "point forward"]),
        ('"parameter_bytes": 3', '"parameter_bytes": -3', ["parameter_bytes", "-3", ">= 0"]),
        ('"batch_size": 4', '"batch_size": 0', ["batch_size 0", ">= 1"]),
        ('"schema_version": 1', '"schema_version": 9', ["schema_version", "9"]),
        ('"layers": [0, 1]', '"layers": [0, 5]', ["'tied'", "[0, 5]", "0..1"]),
        ('"name": "two",', "", ["'name' is missing"]),
        ("{", "", ["not valid JSON", "line"]),
    ],
)
def test_a_wrong_profile_is_answered_with_place_value_and_remedy(
    old: str, new: str, words: list[str], tmp_path: Path
):
    text = document(tmp_path)
    assert old in text
    (tmp_path / "wrong.json").write_text(text.replace(old, new, 1))
    with pytest.raises(BadInput) as caught:
        read_any_profile(tmp_path / "wrong.json")
    message = str(caught.value)
    assert all(word in message for word in ["wrong.json", *words]), message
    assert "\n" not in message


def test_a_profile_without_layers_is_refused():
    empty = {"format": "penstock-profile", "schema_version": 1, "name": "empty", "layers": []}
    with pytest.raises(BadInput, match="no layers"):
        profile_from_json(empty, "p.json")


def test_pipedream_text_becomes_a_chain_in_seconds_per_sample(tmp_path: Path):
    path = tmp_path / "net.txt"
    path.write_text(PIPEDREAM)
    profile = read_any_profile(path, profile_batch=4)
    assert [layer.name.split()[0] for layer in profile.layers] == ["node1", "node2", "node3"]
    assert profile.forward_s(range(3), 4) == pytest.approx(5e-3)
    assert profile.backward_s(range(3), 4) == pytest.approx(8e-3)
    assert profile.layers[1].parameter_bytes == 20
    edges = {(edge.producer, edge.consumer): edge.bytes.at(4) for edge in profile.edges}
    assert edges == {(0, 1): 400.0, (0, 2): 400.0, (1, 2): 120.0}
    assert all(edge.gradient_bytes == Affine() for edge in profile.edges if edge.producer == 0)
    assert "node1 (17 ms)" in profile.source


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("activation_size=8.0", "activation_size=eight", ["line 1", "activation_size", "eight"]),
        (", activation_size=8.0", "", ["line 1", "activation_size", "node1 -- name"]),
        ("\tnode1 -- node2", "\tnode1 - node2", ["line 5", "node1 - node2"]),
        ("\tnode1 -- node2", "\tnode9 -- node2", ["node9", "no node line"]),
        ("\tnode1 -- node2", "\tnode3 -- node2", ["cycle", "node"]),
        ("parameter_size=20.000", "parameter_size=-20", ["parameter_bytes", "-20", ">= 0"]),
    ],
)
def test_a_wrong_pipedream_text_is_answered_with_file_and_line(
    old: str, new: str, words: list[str], tmp_path: Path
):
    assert old in PIPEDREAM
    (tmp_path / "net.txt").write_text(PIPEDREAM.replace(old, new))
    with pytest.raises(BadInput) as caught:
        read_any_profile(tmp_path / "net.txt", profile_batch=4)
    message = str(caught.value)
    assert all(word in message for word in ["net", *words]), message


def test_a_pipedream_text_needs_its_profiled_batch_and_nothing_else_may_have_one(tmp_path: Path):
    (tmp_path / "net.txt").write_text(PIPEDREAM)
    with pytest.raises(BadInput, match="--profile-batch"):
        read_any_profile(tmp_path / "net.txt")
    document(tmp_path)
    with pytest.raises(BadInput, match="leave out --profile-batch"):
        read_any_profile(tmp_path / "p.json", profile_batch=4)
    (tmp_path / "poem.txt").write_text("no graph")
    with pytest.raises(BadInput, match=r"poem\.txt' is neither"):
        read_any_profile(tmp_path / "poem.txt", profile_batch=4)


def test_piper_json_becomes_a_chain(tmp_path: Path):
    (tmp_path / "piper.json").write_text(json.dumps(PIPER))
    profile = read_any_profile(tmp_path / "piper.json")
    assert profile.forward_s(range(1), 1) + profile.backward_s(range(1), 1) == pytest.approx(0.03)
    assert profile.layers[0].saved_bytes.at(1) == 5.0
    assert profile.layers[0].workspace_bytes.at(1) == 5.0
    (tmp_path / "piper.json").write_text(json.dumps(PIPER).replace("timePerSample", "time"))
    with pytest.raises(BadInput, match="timePerSample' is missing"):
        read_any_profile(tmp_path / "piper.json")


@pytest.mark.parametrize(
    "path",
    sorted(PUBLISHED.glob("*/*.txt")) + sorted(PUBLISHED.glob("*/*.json")),
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_published_profiles_can_be_read(path: Path):
    named = path.stem.rpartition("-pbs-")
    batch = int(named[2]) if named[1] else BATCHES.get(path.stem)
    profile = read_any_profile(path, batch)
    everything = range(len(profile.layers))
    assert profile.forward_s(everything, 1) > 0
    assert all(edge.producer < edge.consumer for edge in profile.edges)
    crossed = {edge.producer for edge in profile.edges} | {e.consumer for e in profile.edges}
    assert crossed == set(everything)
