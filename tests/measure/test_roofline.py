"""Estimates for absent hardware follow from operations and bytes, without computing anything."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import Granularity, capture_model
from penstock.capture.contract import Batch
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.toml_file import find_cluster
from penstock.errors import BadInput
from penstock.measure.hardware import HARDWARE, hardware_named
from penstock.measure.layer_runs import LayerRun
from penstock.measure.layer_times import measure_profile
from penstock.measure.roofline import estimate_profile
from penstock.plan.plan import Plan, Stage
from penstock.planners.problem import planning_problem
from penstock.profile.json_file import read_profile, write_profile
from penstock.profile.model_profile import LayerCost
from penstock.simulate.simulation import simulate_plan

ROWS, WIDTH = 64, 2048


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)


def wide(device: str = "cpu", *between: nn.Module) -> nn.Sequential:
    with torch.device(device):
        first, last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 10)
        return nn.Sequential(first, *between, last)


def graph_of(model: nn.Module, batch: Batch) -> LayerGraph:
    return capture_model(model, batch, loss=functional.cross_entropy, granularity="block")


def forward_s(
    module: nn.Module, batch: Batch, hardware: str, rows: int, *, compiled: bool = False
) -> float:
    """Seconds of a module without parameters, which belongs to the layer before it."""
    beside, alone = (
        estimate_profile(
            graph_of(model, batch), batch, hardware, batch_sizes=(rows,), compiled=compiled
        )
        for model in (wide("cpu", module), wide())
    )
    return beside.layers[0].forward_s.at(rows) - alone.layers[0].forward_s.at(rows)


def test_a_matrix_product_takes_its_operations_at_peak_rate(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    profile = estimate_profile(graph_of(wide(), batch), batch, "cpu", batch_sizes=(ROWS,))
    expected_s = 2 * ROWS * WIDTH * WIDTH / HARDWARE["cpu"].flops_per_s
    assert profile.layers[0].forward_s.at(ROWS) == pytest.approx(expected_s, rel=1e-6)
    assert profile.layers[0].backward_weight_s.at(ROWS) == pytest.approx(expected_s, rel=0.1)
    assert profile.layers[0].backward_input_s.at(ROWS) == 0  # the batch wants no gradient
    # Two products of the first layer, three of the last, which sends a gradient back.
    assert profile.flops_per_sample == 2 * WIDTH * (2 * WIDTH + 3 * 10)


def test_an_elementwise_layer_takes_its_bytes_at_memory_rate(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    expected_s = 2 * ROWS * WIDTH * 4 / HARDWARE["cpu"].bytes_per_s
    assert forward_s(nn.ReLU(), batch, "cpu", ROWS) == pytest.approx(expected_s, rel=1e-6)


def test_small_work_on_a_large_device_takes_its_launches(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    launch_s = HARDWARE["H200-141GB"].launch_s
    assert forward_s(nn.ReLU(), batch, "H200-141GB", 1) == pytest.approx(launch_s)
    assert forward_s(nn.ReLU(), batch, "H200-141GB", 2) == pytest.approx(launch_s)


def test_bytes_are_those_that_a_measurement_counts(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    graph = graph_of(wide(), batch)
    estimated = estimate_profile(graph, batch, "A100-80GB", batch_sizes=(8, 16))
    measured = measure_profile(graph, batch, batch_sizes=(8, 16), repeats=1)
    for guess, count in zip(estimated.layers, measured.layers, strict=True):
        assert guess.saved_bytes == count.saved_bytes
        assert guess.parameter_bytes == count.parameter_bytes
    assert estimated.edges == measured.edges


def test_a_faster_device_is_never_slower(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    graph = graph_of(wide(), batch)
    totals = [
        estimate_profile(graph, batch, name).forward_s(range(2), ROWS)
        for name in ("cpu", "V100-16GB", "A100-80GB", "H100-80GB", "H200-141GB")
    ]
    for slower, faster in pairwise(totals):
        assert faster <= slower or faster == pytest.approx(slower, rel=1e-9)


def test_a_model_on_the_meta_device_can_be_estimated(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    real = estimate_profile(graph_of(wide(), batch), batch, "cpu")
    meta = estimate_profile(graph_of(wide("meta"), batch), batch, "cpu")
    assert meta.layers == real.layers


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_autocast_counts_as_the_type_that_it_computes_in(
    device: str, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    rows = 4096

    def seconds(dtype: torch.dtype, autocast: torch.dtype | None) -> float:
        example = (batch[0].to(dtype), batch[1])
        graph = graph_of(wide(device).to(dtype), example)
        costs = estimate_profile(
            graph, example, "H100-80GB", autocast=autocast, batch_sizes=(rows,)
        )
        return costs.layers[0].forward_s.at(rows)

    single, half = seconds(torch.float32, None), seconds(torch.bfloat16, None)
    # Beside the product there are the casts of its inputs.
    assert half < seconds(torch.float32, torch.bfloat16) < 2.5 * half < single


def test_an_estimate_leaves_the_model_its_own_tensors(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    model = wide()
    before = dict(model.named_parameters())
    estimate_profile(graph_of(model, batch), batch, "cpu", batch_sizes=(2,))
    assert all(p is before[name] for name, p in model.named_parameters())


def test_unknown_hardware_lists_what_there_is(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(BadInput, match=r"'TPU' is no TOML .* in the table; use one of V100-16GB"):
        estimate_profile(graph_of(wide(), batch), batch, "TPU")
    with pytest.raises(BadInput, match="did you mean A100-40GB or A100-80GB"):
        hardware_named("A100")
    assert hardware_named("rtx 4090") is HARDWARE["RTX4090-24GB"]


def test_the_name_that_a_driver_gives_a_device_is_known() -> None:
    names = {
        "Tesla V100-SXM2-16GB": "V100-16GB",
        "NVIDIA A100-SXM4-40GB": "A100-40GB",
        "NVIDIA A100-SXM4-80GB": "A100-80GB",
        "NVIDIA H100 80GB HBM3": "H100-80GB",
        "NVIDIA H200": "H200-141GB",
        "NVIDIA H20": "H20-96GB",
        "NVIDIA B200": "B200-180GB",
        "Tesla T4": "T4-16GB",
        "NVIDIA A10": "A10-24GB",
        "NVIDIA L4": "L4-24GB",
        "NVIDIA L40S": "L40S-48GB",
        "NVIDIA GeForce RTX 3090": "RTX3090-24GB",
        "NVIDIA GeForce RTX 4090": "RTX4090-24GB",
        "NVIDIA GeForce RTX 4080": "RTX4080-16GB",
        "NVIDIA GB10": "GB10-128GB",
        "AMD Instinct MI300X": "MI300X-192GB",
    }
    assert set(names.values()) == set(HARDWARE) - {"cpu"}
    for name, known in names.items():
        assert hardware_named(name) is HARDWARE[known], name
    for other in ("NVIDIA H100 PCIe", "Tesla V100-SXM2-32GB", "NVIDIA A10G", "NVIDIA L40"):
        with pytest.raises(BadInput, match="not in the table"):
            hardware_named(other)


def test_a_gpu_has_the_memory_that_its_name_says() -> None:
    for name, known in HARDWARE.items():
        if name != "cpu":
            assert known.memory_bytes == int(name.rpartition("-")[2].removesuffix("GB")) * 1e9


def test_hardware_of_a_file_has_its_rates_and_the_shares_of_a_device_like_it(
    tmp_path: Path, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-it-works" / "planning.md").read_text()
    (text,) = re.findall(r"```toml\n(# l20\.toml\n.*?)```", page, re.DOTALL)
    rates, line, _ = text.partition("like =")
    file = tmp_path / "l20.toml"
    file.write_text(rates)
    at_roofline = hardware_named(str(file))
    assert line and at_roofline.product_share == at_roofline.memory_share == 1.0
    file.write_text(f"{text}product_share = 0.9\n")
    like = hardware_named(str(file))
    assert (like.product_share, like.attention_share, like.bytes_per_s) == (0.9, 0.73, 0.864e12)
    assert like.processors == 0
    file.write_text(f"{text}processors = 92\n")
    assert hardware_named(str(file)).processors == 92
    profile = estimate_profile(graph_of(wide(), batch), batch, str(file))
    assert profile.device == "L20-48GB" and "NVIDIA L20 data sheet" in profile.source
    file.write_text(f"{rates}product_share = 1.2\n")
    with pytest.raises(BadInput, match=r"l20\.toml: hardware\.product_share"):
        hardware_named(str(file))


def test_a_product_takes_whole_waves_of_tiles() -> None:
    gpu = HARDWARE["A100-80GB"]
    high, wide, processors = 256, 128, 108
    for tiles, waves in ((108, 1), (109, 2), (216, 2), (217, 3)):
        filled = gpu.filled(high, wide * tiles)
        assert filled == pytest.approx(tiles / (waves * processors))
    # A row more costs a row of tiles more; which side of a tile is the longer one does not matter.
    rows, columns = 40 * high, 27 * wide
    assert gpu.filled(rows, columns) == gpu.filled(columns, rows) == 1
    assert gpu.filled(rows + 1, columns) == pytest.approx((rows + 1) / rows * 10 / 11)
    # Few tiles are divided along the sum: only their edges are lost.
    assert gpu.filled(high, wide) == 1
    assert gpu.filled(64, wide) == pytest.approx(64 / high)
    assert gpu.filled(high, wide, 109) == gpu.filled(high, wide * 109)
    assert replace(gpu, processors=0).filled(1, 1) == 1


def test_the_share_of_a_wave_counts_in_estimates(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    # 1 x 8 tiles of 128 x 256, half of which 64 rows fill; the weights' gradient fills 8 x 16.
    gpu = HARDWARE["A100-80GB"]
    rate = gpu.flops_per_s * gpu.sustained_share * gpu.product_share
    operations = 2 * ROWS * WIDTH * WIDTH
    estimated = estimate_profile(graph_of(wide(), batch), batch, "A100-80GB").layers[0]
    assert estimated.forward_s.at(ROWS) == pytest.approx(2 * operations / rate, rel=1e-6)
    weight_s = estimated.backward_weight_s.at(ROWS)
    assert weight_s == pytest.approx(operations / rate * 2 * 108 / 128, rel=1e-6)


class Attention(nn.Module):
    """Heads of 64 words' width; ``fused`` by torch's function, or else step by step."""

    def __init__(self, *, fused: bool, causal: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(256, 768)
        self.fused, self.causal = fused, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.enter(x).chunk(3, -1)
        )
        if self.fused:
            found = functional.scaled_dot_product_attention(
                query, key, value, is_causal=self.causal, dropout_p=0.1
            )
        else:
            found = torch.softmax(query @ key.transpose(-1, -2) / 8, -1) @ value
        return found.transpose(1, 2).flatten(2).mean(1)


def attention_cost(words: int, *, fused: bool, causal: bool = False) -> LayerCost:
    with torch.device("meta"):
        model = nn.Sequential(Attention(fused=fused, causal=causal), nn.Linear(256, 4))
    model.to(torch.bfloat16)
    batch = torch.zeros(8, words, 256, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.long)
    profile = estimate_profile(graph_of(model, batch), batch, "H100-80GB", batch_sizes=(8,))
    return profile.layers[0]


def test_fused_attention_neither_writes_nor_keeps_its_scores() -> None:
    fused, plain = attention_cost(2048, fused=True), attention_cost(2048, fused=False)
    assert fused.saved_bytes.at(8) < plain.saved_bytes.at(8) / 8
    assert fused.forward_s.at(8) < plain.forward_s.at(8) / 2


def test_a_causal_mask_halves_the_work_of_attention() -> None:
    whole, causal = (attention_cost(8192, fused=True, causal=mask) for mask in (False, True))
    # The products around it are the same in both.
    operations = 4 * 8 * 4 * 8192 * 8192 * 64
    hardware = HARDWARE["H100-80GB"]
    rate = hardware.half_flops_per_s * hardware.sustained_share
    assert whole.forward_s.at(8) - causal.forward_s.at(8) == pytest.approx(
        operations / 2 / (rate * hardware.attention_share), rel=1e-6
    )
    assert whole.backward_s.at(8) - causal.backward_s.at(8) == pytest.approx(
        2.5 * operations / 2 / (rate * hardware.attention_backward_share), rel=1e-6
    )


class Biased(nn.Module):
    """Attention with a bias that is trained, of which the fused kernel gives no gradient."""

    def __init__(self, told: dict[str, float]) -> None:
        super().__init__()
        self.bias, self.told = nn.Parameter(torch.zeros(64, 64)), told

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(-1, 64, 4, 64).transpose(1, 2)
        attend = nn.functional.scaled_dot_product_attention
        return attend(heads, heads, heads, attn_mask=self.bias, **self.told).mean((1, 2))


def test_attention_has_no_dropout_where_none_is_asked_for() -> None:
    batch = torch.zeros(8, 64, 256), torch.zeros(8, dtype=torch.long)

    def cost_with(**told: float) -> LayerCost:
        graph = graph_of(nn.Sequential(Biased(told), nn.Linear(64, 4)), batch)
        return estimate_profile(graph, batch, "H100-80GB", batch_sizes=(8,)).layers[0]

    assert cost_with() == cost_with(dropout_p=0.0)
    assert cost_with().forward_s.at(8) < cost_with(dropout_p=0.5).forward_s.at(8)


class Elementwise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * 2.0 + 1.0)


def test_fused_operators_read_their_input_and_write_their_result_once(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    plain, fused = (
        forward_s(Elementwise(), batch, "cpu", ROWS, compiled=compiled)
        for compiled in (False, True)
    )
    pass_s = ROWS * WIDTH * 4 / HARDWARE["cpu"].bytes_per_s
    assert plain == pytest.approx(6 * pass_s)
    assert fused == pytest.approx(2 * pass_s)


def test_a_result_that_a_product_reads_is_written_once(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(WIDTH, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x * 2.0)
            return torch.exp(y) * (y @ self.weight)

    graph = graph_of(wide("cpu", Between()), batch)
    profile = estimate_profile(graph, batch, "cpu", batch_sizes=(ROWS,), compiled=True)
    pass_s = ROWS * WIDTH * 4 / HARDWARE["cpu"].bytes_per_s
    # x read, y written; y read by the product; y read, the result and the saved exp(y) written.
    assert profile.layers[1].forward_s.at(ROWS) == pytest.approx(6 * pass_s, rel=0.01)


class Residual(nn.Module):
    """Adds to what it gets, so that neighbours save a tensor in common."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(functional.gelu(self.inner(functional.layer_norm(x, (16,)))))


class Deep(nn.Module):
    def __init__(self, blocks: list[Residual]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = skipped = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x * skipped)


@pytest.mark.parametrize("granularity", ["block", "module", "operator"])
def test_an_estimate_is_the_same_whether_equal_layers_are_run_or_not(
    granularity: Granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Deep([Residual() for _ in range(6)])
    model.blocks[3].requires_grad_(False)
    batch = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    graph = capture_model(model, batch, loss=functional.cross_entropy, granularity=granularity)
    runs: list[int] = []
    forward = LayerRun.forward
    monkeypatch.setattr(LayerRun, "forward", lambda *given: (runs.append(1), forward(*given))[1])
    quick = estimate_profile(graph, batch, "H100-80GB")
    few = len(runs)
    monkeypatch.setattr("penstock.measure.roofline.work_of", lambda run: object())
    runs.clear()
    assert quick == estimate_profile(graph, batch, "H100-80GB")
    assert few < len(runs)


class Masked(nn.Module):
    """Makes a large mask of the batch, which all its blocks read and save."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Residual() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        mask = (x[..., :1] @ x[..., 1:2].transpose(1, 2)).relu() + 1.0
        if mask.min() < 1.0:  # it is not, whatever the batch
            y = y @ y.transpose(1, 2) @ y
        for block in self.blocks:
            y = mask @ block(y)
        return self.last(y).mean(1)


def test_layers_add_up_to_the_same_whatever_the_granularity() -> None:
    batch = torch.randn(8, 32, 4), torch.randint(3, (8,))
    seconds: set[float] = set()
    saved: set[float] = set()
    for granularity in get_args(Granularity):
        graph = capture_model(
            Masked(), batch, loss=functional.cross_entropy, granularity=granularity
        )
        estimated = estimate_profile(graph, batch, "cpu", batch_sizes=(8,))
        measured = measure_profile(graph, batch, batch_sizes=(8,), repeats=1)
        every = range(len(graph.layer_names))
        seconds.add(round(estimated.forward_s(every, 8), 12))
        for profile in (estimated, measured):
            saved.add(sum(layer.saved_bytes.at(8) for layer in profile.layers))
    assert (len(seconds), len(saved)) == (1, 1)


def test_a_cluster_whose_speeds_are_relative_to_another_device_is_refused(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    profile = estimate_profile(graph_of(wide("meta"), batch), batch, "H100-80GB")
    cluster = find_cluster("h100-pod-16")
    plan = Plan((Stage(range(3), (0,), (ROWS,)),), 1, ROWS, "gpipe")
    with pytest.raises(BadInput, match=r"gives that device the speed 4\.26"):
        simulate_plan(plan, profile, cluster)
    with pytest.raises(BadInput, match="write the cluster with speed = 1 for H100-80GB"):
        planning_problem(profile, cluster, ROWS)
    assert simulate_plan(plan, replace(profile, device=""), cluster).iteration_s > 0


def test_the_device_of_an_estimate_is_kept_in_its_file(
    batch: tuple[torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    profile = estimate_profile(graph_of(wide("meta"), batch), batch, "A100-80GB")
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    assert profile.device == "A100-80GB"
