"""A pipeline on one GPU: right in every precision, resumed exactly, no waits of the host."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import gpu_device
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.examples.gpt_text import Gpt, next_byte_loss
from penstock.measure.layer_times import measure_profile
from penstock.plan.plan import Plan, Stage, with_recompute
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.simulate.simulation import simulate_plan

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore")]

DEVICE = torch.device(gpu_device.DEVICE)
ROWS, MICRO_BATCHES = 4, 4
WIDTH, WORDS = (512, 256) if DEVICE.type == "cuda" else (64, 32)
BATCH = ROWS * MICRO_BATCHES


def gpt(width: int = 64) -> tuple[nn.Module, Any, Any]:
    """A small GPT with a batch and its loss."""
    torch.manual_seed(0)
    model = Gpt(blocks=4, width=width, heads=4, vocabulary=64, length=32)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(64, (BATCH, 32), generator=generator) for _ in range(2))
    return model, (tokens, targets), next_byte_loss


def net() -> tuple[nn.Module, Any, Any]:
    """Convolutions with group norms, which torch computes in TF32 by default."""
    torch.manual_seed(0)
    widths = (3, 32, 64, 64)
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU())
        for a, b in pairwise(widths)
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(BATCH, 3, 32, 32, generator=generator)
    classes = torch.randint(10, (BATCH,), generator=generator)
    return nn.Sequential(*layers, head), (pictures, classes), nn.CrossEntropyLoss()


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {"gpt": gpt, "net": net}


def one_device(
    graph: Any, schedule: str = "interleaved", micro_batches: int = MICRO_BATCHES
) -> Plan:
    """Two stages of one device."""
    layers = len(graph.layer_names)
    bounds = (0, layers // 2, layers)
    stages = tuple(Stage(range(bounds[n], bounds[n + 1]), (0,), (ROWS,)) for n in range(2))
    return Plan(stages, micro_batches, ROWS, schedule)


def captured(
    name: str, device: torch.device = DEVICE, times: int = 1, compile: bool = False
) -> tuple[LayerGraph, Any]:
    """A model and its batch, of so many times the rows, on a device."""
    model, batch, loss = MODELS[name]()
    own = tuple(tensor.repeat_interleave(times, 0).to(device) for tensor in batch)
    return capture_model(model.to(device), own, loss=loss, compile=compile), own


def pipeline(name: str, *, compile: bool = False, **options: Any) -> tuple[Pipeline, Any]:
    graph, batch = captured(name, compile=compile)
    options = {"optimizer": lambda p: AdamW(p, lr=1e-3), "device": DEVICE, **options}
    return Pipeline(graph, batch, plan=one_device(graph), **options), batch


PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"autocast": torch.bfloat16},
    "float16": {"autocast": torch.float16},
    "compiled": {"compile": True},
    "compiled bfloat16": {"compile": True, "autocast": torch.bfloat16},
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_the_first_step_is_that_of_the_module(name: str, precision: str) -> None:
    pipe, batch = pipeline(name, **PRECISIONS[precision])
    with pipe:
        losses = [pipe.step(batch).loss for _ in range(4)]
        assert pipe.verified is not None and pipe.verified.equal, pipe.verified
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_left_on_the_host_is_trained_on_the_device(name: str) -> None:
    graph, batch = captured(name, torch.device("cpu"))
    with Pipeline(
        graph, batch, plan=one_device(graph), optimizer=lambda p: SGD(p, lr=0.1), device=DEVICE
    ) as pipe:
        first = pipe.step(batch).loss
        assert pipe.verified is not None and pipe.verified.equal, pipe.verified
        assert pipe.step(batch).loss < first
        assert {p.device.type for _, p in pipe.named_parameters()} == {DEVICE.type}
        pipe.evaluate(batch)
        pipe.predict(batch)


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_is_bit_equal(name: str, tmp_path: Path) -> None:
    torch.backends.cudnn.deterministic = True
    pipe, batch = pipeline(name)
    with pipe:
        losses = [pipe.step(batch).loss for _ in range(3)]
        pipe.save(tmp_path / "three")
        losses += [pipe.step(batch).loss for _ in range(3)]
    again, _ = pipeline(name)
    with again:
        again.load(tmp_path / "three")
        assert [again.step(batch).loss for _ in range(3)] == losses[3:]


def test_dropout_is_drawn_again_where_a_stage_is_recomputed() -> None:
    torch.backends.cudnn.deterministic = True
    gradients: list[dict[str, torch.Tensor]] = []
    for recompute in (False, True):
        graph, batch = captured("net")
        plan = with_recompute(one_device(graph), recompute)
        with Pipeline(graph, batch, plan=plan, device=DEVICE, verify="off") as pipe:
            pipe.step(batch)
            gradients.append({n: p.grad.clone() for n, p in pipe.named_parameters()})  # type: ignore[union-attr]
    first, second = gradients
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("schedule", ["spectrain", "pipedream", "2bw"])
def test_schedules_without_a_flush_are_those_of_the_host(schedule: str) -> None:
    found: list[list[float]] = []
    for device in (torch.device("cpu"), DEVICE):
        model, batch, loss = gpt()
        model = model.double().to(device)
        own = tuple(tensor.to(device) for tensor in batch)
        graph = capture_model(model, own, loss=loss)
        layers = len(graph.layer_names)
        stages = tuple(
            Stage(range(layers * n // 3, layers * (n + 1) // 3), (n,), (ROWS,)) for n in range(3)
        )
        plan = Plan(stages, MICRO_BATCHES, ROWS, schedule)
        options: Any = {"safety": Safety(transport="in-process"), "verify": "off", "device": device}
        make = partial(SGD, lr=0.05, momentum=0.9)
        with Pipeline(graph, own, plan=plan, optimizer=make, **options) as pipe:
            found.append([metrics.loss for metrics in pipe.stream([own] * 4)])
    assert found[1] == pytest.approx(found[0], rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_the_host_does_not_wait_inside_an_iteration(name: str) -> None:
    """As many waits with twelve micro-batches as with four: they are at the end of a step."""
    waits: list[int] = []
    for micro_batches in (4, 12):
        graph, own = captured(name, times=micro_batches // 4)
        plan = one_device(graph, micro_batches=micro_batches)
        options: dict[str, Any] = {"optimizer": lambda p: AdamW(p, lr=1e-3), "device": DEVICE}
        with Pipeline(graph, own, plan=plan, verify="off", **options) as pipe:
            pipe.step(own)
            pipe.step(own)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                if DEVICE.type == "cuda":
                    torch.cuda.set_sync_debug_mode("warn")
                try:
                    pipe.step(own)
                finally:
                    if DEVICE.type == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
            waits.append(sum("called a synchronizing" in str(w.message) for w in told))
    assert waits[0] == waits[1]


@pytest.mark.parametrize("own_checkpoints", [False, True])
def test_the_peak_is_that_of_the_prediction(own_checkpoints: bool) -> None:
    """Of a model with checkpoints of its own too; large, so that rounding of sizes is small."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=6, n_embd=WIDTH, n_head=8, vocab_size=4096, n_positions=WORDS, bos_token_id=1,
        eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    if own_checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(2, 4096, (BATCH, WORDS))
    batch = {"input_ids": tokens.to(DEVICE), "labels": tokens.to(DEVICE)}
    graph = capture_model(model.to(DEVICE), batch)
    few = {name: tensor[:ROWS] for name, tensor in batch.items()}
    profile = measure_profile(graph, few, batch_sizes=(1, ROWS), repeats=1, device=DEVICE)
    plan = one_device(graph)
    cluster = Cluster("here", (Host("here", (Device("gpu", 1e12),), inf),))
    prediction = simulate_plan(plan, profile, cluster, optimizer_bytes_per_parameter_byte=2.0)
    with Pipeline(
        graph,
        batch,
        plan=plan,
        optimizer=lambda p: AdamW(p, fused=True),
        device=DEVICE,
        verify="off",
    ) as pipe:
        pipe.step(batch)
        with pipe.measuring_memory() as memory:
            pipe.step(batch)
    predicted = prediction.peak_memory_bytes[0]
    print(f"predicted {predicted / 1e6:.0f} MB, measured {memory.peak_bytes / 1e6:.0f} MB")
    assert memory.peak_bytes == pytest.approx(predicted, rel=0.1)


COMMANDS = {
    "train": ["train", "gpt-text", "--workers", "1", "--steps", "30"],
    "train resnet": ["train", "resnet-digits", "--workers", "1", "--steps", "20"],
    "verify": ["verify", "gpt-text", "--workers", "1"],
    "profile": ["profile", "gpt-text"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str, tmp_path: Path) -> None:
    device = ["--device", "cuda"] if DEVICE.type == "cuda" else []
    place = ["-o", str(tmp_path / "out")] if "verify" not in name else []
    start = [sys.executable, "-c", "from penstock.cli import main; main()"]
    command = [*start, *COMMANDS[name], *device, *place]
    ended = subprocess.run(command, capture_output=True, text=True)
    print(ended.stdout[-3000:], ended.stderr[-2000:])
    assert ended.returncode == 0
