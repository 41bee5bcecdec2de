"""Profiles on disk in every format, and what is said of wrong ones."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from planning_strategies import profiles

from penstock.errors import BadInput
from penstock.profile.find import find_profile
from penstock.profile.json_file import profile_from_json, read_profile, write_profile
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile, SharedParameter
from penstock.profile.pipedream_text import chain_order

PIPEDREAM = """\
node3 -- Add -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size=0.0
node1 -- Input -- forward_compute_time=17.0, backward_compute_time=0.0, activation_size=400.0, parameter_size=0
node2 -- Conv(3, 8, kernel=(3, 3)) -- forward_compute_time=4.0, backward_compute_time=6.0, activation_size=[80; 40], parameter_size=20.000 -- stage_id=1
\tnode2 -- node3
\tnode1 -- node2
\tnode1 -- node3
"""  # noqa: E501


@settings(max_examples=50, deadline=None)
@given(profiles())
def test_every_profile_survives_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, profile: ModelProfile
):
    path = tmp_path_factory.mktemp("profiles") / "p.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert find_profile(path) == profile


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
        ('"schema_version": 2', '"schema_version": 1', ["schema_version is 1", "profile"]),
        ('"schema_version": 2', '"schema_version": 9', ["schema_version is 9", "must be 2"]),
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
        find_profile(tmp_path / "wrong.json")
    message = str(caught.value)
    assert all(word in message for word in ["wrong.json", *words]), message
    assert "\n" not in message


def test_a_profile_without_layers_is_refused():
    empty = {"format": "penstock-profile", "schema_version": 2, "name": "empty", "layers": []}
    with pytest.raises(BadInput, match="no layers"):
        profile_from_json(empty, "p.json")


def test_pipedream_text_becomes_a_chain_in_seconds_per_sample(tmp_path: Path):
    path = tmp_path / "net.txt"
    path.write_text(PIPEDREAM)
    profile = find_profile(path, profile_batch=4)
    assert [layer.name.split()[0] for layer in profile.layers] == ["node1", "node2", "node3"]
    assert profile.forward_s(range(3), 4) == pytest.approx(5e-3)
    assert profile.backward_s(range(3), 4) == pytest.approx(8e-3)
    assert profile.layers[1].parameter_bytes == 20
    edges = {(edge.producer, edge.consumer): edge.bytes.at(4) for edge in profile.edges}
    assert edges == {(1, 2): 120.0}  # the input is of the batch, which every stage has
    assert "node1 (17 ms)" in profile.source


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("activation_size=8.0", "activation_size=eight", ["line 1", "activation_size", "eight"]),
        (", activation_size=8.0", "", ["line 1", "activation_size", "node1 -- name"]),
        ("\tnode1 -- node2", "\tnode1 - node2", ["line 5", "node1 - node2"]),
        ("\tnode1 -- node2", "\tnode9 -- node2", ["line 5", "node9", "no node line"]),
        ("\tnode1 -- node2", "\tnode3 -- node2", ["cycle", "node"]),
        ("parameter_size=20.000", "parameter_size=-20", ["line 3", "parameter_size", "-20"]),
        ("[80; 40]", "[80; nan]", ["line 3", "activation_size", "nan", "finite"]),
        ("time=17.0", "time=inf", ["line 2", "forward_compute_time", "inf", "finite"]),
        ("[80; 40]", "[80; forty]", ["line 3", "activation_size", "forty", "[a; b]"]),
        ("[80; 40]", "[80; 40", ["line 3", "activation_size"]),
        ("node1 -- Input", "node3 -- Input", ["line 2", "'node3'", "already on line 1"]),
        ("\tnode2 -- node3", "\tnode2 -- node3\n\tnode3 -- node2", ["node2 -> node3 -> node2"]),
        ("\tnode2 -- node3", "\tnode2 -- node3\n\tnode2 -- node2", ["node2 -> node2"]),
    ],
)
def test_a_wrong_pipedream_text_is_answered_with_file_and_line(
    old: str, new: str, words: list[str], tmp_path: Path
):
    assert old in PIPEDREAM
    (tmp_path / "net.txt").write_text(PIPEDREAM.replace(old, new))
    with pytest.raises(BadInput) as caught:
        find_profile(tmp_path / "net.txt", profile_batch=4)
    message = str(caught.value)
    assert all(word in message for word in ["net", *words]), message


def test_a_long_cycle_is_named_in_part():
    nodes = [f"n{i:02}" for i in range(20)]
    edges = {a: (b,) for a, b in pairwise([*nodes, nodes[0]])} | {"in": ("n05",)}
    with pytest.raises(BadInput, match=r"n00 -> n01 -> .* -> n06 -> \.\.\. \(20 nodes\)"):
        chain_order(["in", *nodes], edges, "net")


def test_a_pipedream_text_needs_its_profiled_batch_and_nothing_else_may_have_one(tmp_path: Path):
    (tmp_path / "net.txt").write_text(PIPEDREAM)
    with pytest.raises(BadInput, match="--profile-batch"):
        find_profile(tmp_path / "net.txt")
    document(tmp_path)
    with pytest.raises(BadInput, match="leave out --profile-batch"):
        find_profile(tmp_path / "p.json", profile_batch=4)
    (tmp_path / "poem.txt").write_text("no graph")
    with pytest.raises(BadInput, match=r"poem\.txt' is neither"):
        find_profile(tmp_path / "poem.txt", profile_batch=4)


def test_pipers_json_is_refused_in_a_line(tmp_path: Path):
    (tmp_path / "piper.json").write_text('{"maxDevices": 2, "nodes": [], "edges": []}')
    with pytest.raises(BadInput, match=r"piper\.json' is in Piper's JSON.*'bert-32'"):
        find_profile(tmp_path / "piper.json")
