"""The built-in models: equal to the published profiles, and what is said of a wrong table."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.cluster.presets import find_cluster
from penstock.errors import BadInput
from penstock.plan.cost import device_memory_bytes
from penstock.planning.questions import planning_problem
from penstock.profile import built_in
from penstock.profile.built_in import MODELS
from penstock.profile.find import find_profile, read_any_profile
from penstock.profile.json_file import read_profile, write_profile
from penstock.profile.model_profile import Edge, ModelProfile
from penstock.profile.model_table import model_from_table

PUBLISHED = Path(__file__).parents[3] / "shared" / "profiles"
FILES = {
    "bert-48": ("dapple/bert-48-pbs-2.txt", 2),
    "xlnet-36": ("dapple/xlnet-36-pbs-1.txt", 1),
    "gnmt-16": ("dapple/gnmt-16-pbs-64.txt", 64),
    "amoebanet-36": ("dapple/amoeba-36-pbs-1.txt", 1),
    "vgg-19": ("dapple/vgg-19-pbs-32.txt", 32),
    "resnet-50": ("pipedream/resnet50.txt", 128),
    "vgg-16": ("pipedream/vgg16.txt", 128),
    "inception-v3": ("pipedream/inception_v3.txt", 128),
    "gnmt-8": ("pipedream/gnmt.txt", 64),
    "bert-32": ("piper/bert32a100.json", None),
}
SAVED_BYTES_PER_SAMPLE = {
    "bert-48": 3.473e9,
    "xlnet-36": 5.914e9,
    "gnmt-16": 100e6,
    "amoebanet-36": 5.08e9,
    "vgg-19": 70e6,
    "resnet-50": 70e6,
}
ROUNDING = 5e-5
"""Five significant digits."""

TABLE = """
name = "three layers"
source = "by hand"
batch_size = 2
layers = '''
layer    forward_ms  backward_ms  activation_mb  parameter_mb  reads
input    0           0            0.5            0             -
block*2  2           4            4              50            1,@0
head     1           2            0.01           4.5           1,2=3
'''
"""


def file_of(name: str) -> ModelProfile:
    """The published profile of a model."""
    path, batch = FILES[name]
    if not PUBLISHED.exists():
        pytest.skip(f"{PUBLISHED} is absent: the published profiles cannot be compared with")
    return read_any_profile(PUBLISHED / path, batch)


def edge_bytes(edges: Iterable[Edge]) -> dict[tuple[int, int], tuple[float, float]]:
    """Bytes of a sample, forwards and backwards, by producer and consumer."""
    return {(e.producer, e.consumer): (e.bytes.at(1), e.gradient_bytes.at(1)) for e in edges}


@pytest.mark.parametrize("name", MODELS)
def test_a_table_is_the_published_profile_to_five_digits(name: str):
    table, published = find_profile(name), file_of(name)
    assert table.batch_size == published.batch_size
    assert len(table.layers) == len(published.layers)
    for ours, theirs in zip(table.layers, published.layers, strict=True):
        for figure in ("forward_s", "backward_input_s", "backward_weight_s"):
            expected = getattr(theirs, figure).at(1)
            assert getattr(ours, figure).at(1) == pytest.approx(expected, rel=ROUNDING, abs=1e-15)
        assert ours.parameter_bytes == pytest.approx(theirs.parameter_bytes, rel=ROUNDING, abs=1)
        if name not in SAVED_BYTES_PER_SAMPLE:
            expected = theirs.saved_bytes.at(1)
            assert ours.saved_bytes.at(1) == pytest.approx(expected, rel=ROUNDING)
    ours, theirs = edge_bytes(table.edges), edge_bytes(published.edges)
    assert ours.keys() == theirs.keys()
    for ends, sizes in ours.items():
        assert sizes == pytest.approx(theirs[ends], rel=ROUNDING)


@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_crosses_each_cut_as_often_as_in_the_published_profile(name: str):
    table, published = find_profile(name), file_of(name)
    for cut in range(1, len(table.layers)):
        ours = {edge.tensor for edge in table.crossing(cut)}
        assert len(ours) == len({edge.tensor for edge in published.crossing(cut)})


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_file_with_its_source_and_survives_a_round_trip(
    name: str, tmp_path: Path
):
    files = Path(built_in.__file__).parent / "models"
    assert sorted(path.stem for path in files.glob("*.toml")) == sorted(MODELS)
    profile = find_profile(name)
    assert profile.name == name
    assert "published with" in profile.source
    assert profile.source[1:] in " ".join(
        line.removeprefix("# ") for line in (files / f"{name}.toml").read_text().splitlines()
    )
    write_profile(profile, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile


@pytest.mark.parametrize("name", SAVED_BYTES_PER_SAMPLE)
def test_a_sample_keeps_the_bytes_of_the_paper(name: str):
    profile = find_profile(name)
    saved = profile.saved_bytes(range(len(profile.layers)), 1)
    assert saved == pytest.approx(SAVED_BYTES_PER_SAMPLE[name])


@pytest.mark.parametrize(
    ("name", "rows", "optimizer", "gigabytes"),
    [
        # DAPPLE's planner: three times the weights, and the peak activations of a sample.
        ("bert-48", 1, 1, 11.4),
        ("xlnet-36", 1, 1, 12.0),
        # The paper: does not fit in 16 GB.
        ("amoebanet-36", 1, 2, 20.0),
    ],
)
def test_the_memory_on_one_device_is_that_of_the_paper(
    name: str, rows: int, optimizer: float, gigabytes: float
):
    profile = find_profile(name)
    problem = planning_problem(
        profile, find_cluster("dapple-a"), 16, optimizer_bytes_per_parameter_byte=optimizer
    )
    everything = range(len(profile.layers))
    needed = device_memory_bytes(problem, everything, rows, in_flight=1, recompute=False)
    assert needed / 1e9 == pytest.approx(gigabytes, rel=0.03)


def test_two_stages_of_bert_48_need_the_memory_that_dapple_measured():
    """DAPPLE against GPipe, two stages, micro-batches of 2: 10.6 GB and 12.1 GB on average."""
    profile = find_profile("bert-48")
    problem = planning_problem(profile, find_cluster("dapple-b"), 64)
    half = len(profile.layers) // 2
    stages = (range(half), range(half, len(profile.layers)))

    def average_gb(*depths: int) -> float:
        peaks = [
            device_memory_bytes(problem, layers, 2, in_flight=depth, recompute=False)
            for layers, depth in zip(stages, depths, strict=True)
        ]
        return sum(peaks) / len(peaks) / 1e9

    assert average_gb(2, 1) == pytest.approx(10.6, rel=0.05)
    assert average_gb(2, 2) == pytest.approx(12.1, rel=0.03)


def test_a_table_is_read_as_written():
    profile = model_from_table(TABLE, "t.toml")
    assert [layer.name for layer in profile.layers] == ["0 input", "1 block", "2 block", "3 head"]
    assert profile.forward_s(range(4), 2) == pytest.approx(5e-3)
    assert profile.backward_s(range(4), 2) == pytest.approx(10e-3)
    assert profile.parameter_bytes(range(4)) == 104_500_000
    assert [layer.saved_bytes.at(2) for layer in profile.layers] == [0, 4e6, 4e6, 1e4]
    # The input is of the batch, which every stage has.
    assert [(e.producer, e.consumer, e.tensor, e.bytes.at(2)) for e in profile.edges] == [
        (1, 2, "1", 4e6),
        (2, 3, "2", 4e6),
        (1, 3, "1=3", 3e6),
    ]
    assert all(edge.gradient_bytes == edge.bytes for edge in profile.edges)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("1,2=3", "1,9", ["layer 3 reads '9'", "no earlier layer"]),
        ("1,2=3", "1,x", ["layer 3 reads 'x'", "@0"]),
        ("head     1 ", "head     a ", ["head a 2", "no layer"]),
        ("head     1           2            0.01           4.5", "head 1", ["head 1", "no layer"]),
        ("parameter_mb", "weights_mb", ["weights_mb", "parameter_mb"]),
        ("head     1 ", "head     -1 ", ["'3 head'", "-0.0005", ">= 0"]),
        ("source", "origin", ["origin"]),
    ],
)
def test_a_wrong_table_is_answered_with_its_line(old: str, new: str, words: list[str]):
    assert old in TABLE
    with pytest.raises(BadInput) as caught:
        model_from_table(TABLE.replace(old, new), "t.toml")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_name_that_is_no_model_is_answered_with_the_nearest(tmp_path: Path):
    with pytest.raises(BadInput, match=r"'bert48' is neither .* did you mean 'bert-48'"):
        find_profile("bert48")
    with pytest.raises(BadInput, match=r"'zzz' is neither .*vgg-19.* check the path"):
        find_profile("zzz")
    with pytest.raises(BadInput, match="does not exist"):
        find_profile(tmp_path / "none.txt", 4)
    with pytest.raises(BadInput, match="leave out --profile-batch"):
        find_profile("bert-48", 2)
