"""The built-in models: equal to the published profiles, and what is said of a wrong table."""

from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.cluster.toml_file import find_cluster
from penstock.costs.stage_costs import device_memory_bytes
from penstock.errors import BadInput
from penstock.plan.plan import Stage
from penstock.planners.problem import planning_problem
from penstock.profile import built_in
from penstock.profile.built_in import MODELS, model_from_table
from penstock.profile.find import find_profile
from penstock.profile.json_file import read_profile, write_profile
from penstock.profile.model_profile import ModelProfile

SUMS = """
model         layers  edges  forward_s       backward_s      parameters     edges_bytes
bert-48       53      50     0.0645935       0.10728         2.54980506e09  108134400
xlnet-36      43      75     0.12293         0.17778         2.003e09       222000000
gnmt-16       96      102    0.00141139062   0.00247792188   1.16298835e09  15023808
amoebanet-36  44      81     0.04867         0.11938         3.73113578e09  585831332
vgg-19        26      24     0.0015003125    0.00300625      548047022      61254000
resnet-50     177     192    0.0014256875    0.00203852344   102228128      172730368
vgg-16        41      40     0.00182735937   0.00342682031   553430176      114800640
inception-v3  326     361    0.00225991406   0.00312319531   108645056      159203712
gnmt-8        48      46     0.000523953125  0.000873171875  775063808      4849280
bert-32       37      33     0.324288        0.648576        5.8794816e09   583008256
"""
"""Sums over the published files: numbers of layers and edges; seconds of forwards and of backwards,
bytes of parameters and of edges."""

SUMS_BY_PLACE = """
model         forward_s     backward_s    parameters     edges_bytes
bert-48       1.840055      3.05748       6.95304479e10  1.07269325e11
xlnet-36      3.01884       4.38114       4.6126e10      6.342e10
gnmt-16       0.0736447812  0.124986203   5.18160499e10  4.35451179e10
amoebanet-36  1.22624       2.93487       1.22362035e11  2.33615799e11
vgg-19        0.01408       0.02830625    1.21909803e10  4.2612875e09
resnet-50     0.105019531   0.151887992   1.41645966e10  9.03427376e11
vgg-16        0.0219038047  0.0390854531  1.90005813e10  1.54460939e10
inception-v3  0.272727992   0.362498328   2.56338318e10  2.71073926e12
gnmt-8        0.0128821875  0.0222590938  1.70566387e10  3.5421127e09
bert-32       6.63786133    13.2757227    1.17258313e11  3.02419804e11
"""
"""The same of the files' figures, each times the place of its layer, or of both layers."""


def table_of(text: str) -> dict[str, list[float]]:
    """The figures of each model."""
    rows = [line.split() for line in text.strip().splitlines()[1:]]
    return {name: list(map(float, figures)) for name, *figures in rows}


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


def sums(profile: ModelProfile, *, by_place: bool) -> list[float]:
    """The sums of the layers' and edges' figures, perhaps each times its place."""
    layers = [(layer, i if by_place else 1) for i, layer in enumerate(profile.layers, 1)]
    edges = [(e, (e.producer + 1) * (e.consumer + 1) if by_place else 1) for e in profile.edges]
    return [
        sum(place * layer.forward_s.at(1) for layer, place in layers),
        sum(place * layer.backward_s.at(1) for layer, place in layers),
        sum(place * layer.parameter_bytes for layer, place in layers),
        sum(place * edge.bytes.at(1) for edge, place in edges),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_a_table_sums_up_to_the_published_profile(name: str):
    profile = find_profile(name)
    layers, edges, *expected = table_of(SUMS)[name]
    assert (len(profile.layers), len(profile.edges)) == (layers, edges)
    assert sums(profile, by_place=False) == pytest.approx(expected, rel=ROUNDING)
    expected = table_of(SUMS_BY_PLACE)[name]
    assert sums(profile, by_place=True) == pytest.approx(expected, rel=ROUNDING)


# Piper's file says itself what is kept.
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"bert-32"}))
def test_a_layer_keeps_its_output_where_the_paper_says_nothing_else(name: str):
    profile = find_profile(name)
    outputs = {edge.producer: edge.bytes.at(1) for edge in profile.edges}
    kept = [(i, layer.saved_bytes.at(1)) for i, layer in enumerate(profile.layers)]
    differ = [i for i, saved in kept if i in outputs and saved != pytest.approx(outputs[i])]
    assert bool(differ) == (name in SAVED_BYTES_PER_SAMPLE)


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
    saved = sum(layer.saved_bytes.at(1) for layer in profile.layers)
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
    everything = Stage(range(len(profile.layers)), (0,), (rows,))
    needed = device_memory_bytes(problem, everything, rows, 1)
    assert needed / 1e9 == pytest.approx(gigabytes, rel=0.03)


def test_two_stages_of_bert_48_need_the_memory_that_dapple_measured():
    """DAPPLE against GPipe, two stages, micro-batches of 2: 10.6 GB and 12.1 GB on average."""
    profile = find_profile("bert-48")
    problem = planning_problem(profile, find_cluster("dapple-b"), 64)
    half = len(profile.layers) // 2
    stages = (range(half), range(half, len(profile.layers)))

    def average_gb(*depths: int) -> float:
        peaks = [
            device_memory_bytes(problem, Stage(layers, (0,), (2,)), 2, depth)
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
        ("head     1 ", "head     -1 ", ["'head -1", "from 0 to"]),
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


def test_resnet_50_has_the_batch_norms_of_the_architecture() -> None:
    """As transformers builds it."""
    import transformers

    with torch.device("meta"):
        model = transformers.ResNetModel(transformers.ResNetConfig())
    channels = [m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    layers = MODELS["resnet-50"]().layers
    found = [layer.norm_channels for layer in layers if layer.norms]
    assert sorted(found) == sorted(channels) and len(found) == 53


def test_inception_and_amoebanet_have_the_batch_norms_of_their_architectures() -> None:
    """Inception v3: one behind each of 94 convolutions and two of the auxiliary classifier. Normal
    and reducing cells of AmoebaNet-D: 13 and 10."""
    inception, amoebanet = MODELS["inception-v3"]().layers, MODELS["amoebanet-36"]().layers
    assert sum(layer.norms for layer in inception) == 94 + 2
    assert sum(layer.norms for layer in amoebanet) == 36 * 13 + 4 * 10 + 1
    normed = {name for name, model in MODELS.items() if model().has_norms}
    assert normed == {"resnet-50", "inception-v3", "amoebanet-36"}
