"""A quantised frozen base with adapters trains in a pipeline as in one process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime.quantised_cases import (
    KINDS,
    ROWS,
    SAVED,
    adapted,
    all_from_meta,
    all_trained,
    base,
    captured,
    plain_losses,
    tokens,
)
from torch import nn

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.measure.layer_times import measure_profile
from penstock.measure.roofline import estimate_profile
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.stage.building import give_values

# torchao's libraries for other Pythons, and what it says of itself when it is loaded.
pytestmark = pytest.mark.filterwarnings("ignore")

CLASSES = {"int8": "Int8Tensor", "int4": "IntxUnpackedToInt8Tensor", "nf4": "Params4bit"}

Found = dict[str, Any]


@pytest.fixture(scope="module", params=[False, True], ids=["two stages", "two replicas"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder: Path = tmp_path_factory.mktemp("runs")
    ranks = launch_workers(all_trained, (request.param, folder), workers=2, threads=1)
    return {"ranks": ranks, "folder": folder, "replicas": request.param}


@pytest.mark.parametrize("kind", KINDS)
def test_as_in_one_process(kind: str, runs: Found) -> None:
    for own in (rank[kind] for rank in runs["ranks"]):
        assert own["losses"] == pytest.approx(plain_losses(kind), abs=1e-6)
        assert own["verified"].startswith("equal to your module")
        assert 0 < own["evaluated"] < 10
        assert CLASSES[kind] in own["kinds"]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_weights_are_refused_and_adapters_saved(kind: str, runs: Found) -> None:
    for own in (rank[kind] for rank in runs["ranks"]):
        for said in own["refusals"]:
            assert "is quantised" in said and "save_adapters()" in said
    saved = runs["folder"] / f"{kind}-{runs['replicas']}" / "adapters"
    assert {file.name for file in saved.iterdir()} >= {"adapter_model.safetensors"}


@pytest.fixture(scope="module")
def from_meta(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder: Path = tmp_path_factory.mktemp("weights")
    for name, factor in (("base", 1.0), ("other", 1.5)):
        model: Any = base()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        model.save_pretrained(folder / name)
    ranks = launch_workers(all_from_meta, (folder,), workers=2, threads=1)
    return {"ranks": ranks, "folder": folder}


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_quantises_what_it_holds(kind: str, from_meta: Found) -> None:
    """A checkpoint has all of a quantised weight: that of the resumed run was another one."""
    ranks = [rank[kind] for rank in from_meta["ranks"]]
    expected = plain_losses(kind, from_meta["folder"] / f"{kind}-adapters")
    for own in ranks:
        assert own["losses"] == pytest.approx(expected, abs=1e-6)
        assert own["verified"].startswith("equal to your module")
        assert own["resumed"] == own["losses"][SAVED:]
        assert "quantise weights as the model was quantised" in own["refusal"]
    first, second = (set(own["quantised"]) for own in ranks)
    assert len(first) == len(second) == 7
    assert not first & second


@pytest.mark.parametrize("kind", KINDS)
def test_on_meta_bytes_and_estimates_are_as_with_values(kind: str) -> None:
    graph = captured(kind)
    on_meta = capture_model(adapted(kind, on_meta=True), tokens(0), granularity="block")
    assert on_meta.parameter_uses == graph.parameter_uses
    asked: Any = (tokens(0), "H100-80GB")
    found = estimate_profile(graph, *asked, batch_sizes=(ROWS,))
    assert estimate_profile(on_meta, *asked, batch_sizes=(ROWS,)) == found


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_estimates(kind: str) -> None:
    graph = captured(kind)
    names = dict(graph.program.named_parameters())
    wide = sum(p.nbytes for p in names.values() if p.requires_grad)
    linear = sum(64 * n for n in (64, 32, 32, 64, 128, 128, 128)) * 2
    counted = sum(
        u.bytes for u in graph.parameter_uses if "base_layer" in u.name or "proj" in u.name
    )
    each = {"int8": 1.0, "int4": 1.0, "nf4": 0.5}[kind]
    assert each * linear <= counted - wide < 1.2 * each * linear + 10_000
    found = estimate_profile(graph, tokens(0), "H100-80GB", batch_sizes=(ROWS,))
    measured = measure_profile(graph, tokens(0), batch_sizes=(4,), repeats=1)
    assert [x.buffer_bytes for x in found.layers] == [x.buffer_bytes for x in measured.layers]
    assert all(layer.forward_s.at(4) >= 0 for layer in found.layers)
    assert sum(layer.forward_s.at(4) for layer in found.layers) > 0


@pytest.mark.parametrize("place", ["meta", "files"])
def test_what_has_no_values_yet_is_refused(place: str, tmp_path: Path) -> None:
    graph = captured("int8")
    weight = next(p for n, p in graph.program.named_parameters() if "q_proj.base_layer" in n)
    program = SimpleNamespace(module=nn.ParameterDict({"weight": weight}))
    if place == "meta":
        program.module["weight"] = nn.Parameter(weight.to("meta"), requires_grad=False)
    sources: Any = {"weight": None} if place == "files" else {}
    with pytest.raises(BadInput, match="'weight' is quantised and has no values yet"):
        give_values(program, graph, sources, torch.device("cpu"), 0)  # type: ignore[arg-type]
