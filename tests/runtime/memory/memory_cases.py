"""What the worker processes of the memory tests run: predicted and measured peaks, and growth."""

import gc
import time
from collections.abc import Sequence
from math import inf
from typing import Any

import models
import torch
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import integers, join, plan_of
from runtime.pipeline_life_cases import held
from torch import nn

from penstock.capture.capture import capture_model
from penstock.capture.contract import Batch
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.measure.layer_times import measure_profile
from penstock.plan.plan import Plan, with_recompute
from penstock.runtime.measured_memory import MeasuredMemory
from penstock.runtime.options import Safety
from penstock.simulate.simulation import Prediction, simulate_plan

WIDTH, SEQUENCE, VOCABULARY = 128, 32, 100
ROWS, MICRO_BATCHES = 4, 6

GPT2: dict[str, Any] = {
    "n_layer": 4,
    "n_embd": WIDTH,
    "n_head": 4,
    "n_positions": SEQUENCE,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}


class Block(nn.Module):
    """A residual layer that saves far more than it passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, and a head that is the last layer."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


def batch(rows: int = ROWS * MICRO_BATCHES) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = integers(rows, SEQUENCE, VOCABULARY)
    return tokens, tokens.clone()


def graph_of_model() -> LayerGraph:
    torch.manual_seed(0)
    return capture_model(Model(), batch(3), loss=nn.functional.cross_entropy)


def predict(graph: LayerGraph, plan: Plan, example: Batch, state: float) -> Prediction:
    """What is simulated from a model's counted bytes."""
    profile = measure_profile(graph, example, batch_sizes=(1, plan.micro_batch_size), repeats=1)
    devices = max(plan.devices) + 1
    cluster = Cluster("here", (Host("here", (Device("cpu", 1e12),) * devices, inf),))
    return simulate_plan(plan, profile, cluster, optimizer_bytes_per_parameter_byte=state)


def predicted_and_measured(
    graph: LayerGraph, plan: Plan, example: Batch, optimizer: Any, state: float
) -> tuple[float, MeasuredMemory, float]:
    """This rank's peak as simulated from its model's counted bytes, and as measured."""
    prediction = predict(graph, plan, example, state)
    with Pipeline(graph, example, plan=plan, optimizer=optimizer, timeout_s=100) as pipe:
        for _ in range(2):  # in both, losses are compared, for which outputs are kept
            pipe.step(example)
        with pipe.measuring_memory() as memory:
            pipe.step(example)
        rank = pipe.rank
        pipe.close(gather=True)
    most = prediction.peak_memory_bytes[rank]
    kept = [event for event in prediction.timeline.memory if event.device == rank]
    return most, memory, kept[0].bytes


def peaks_of(plans: Sequence[Plan]) -> list[tuple[float, MeasuredMemory, float]]:
    """`predicted_and_measured` of the test's model under each plan."""
    join()
    graph = graph_of_model()
    adam = torch.optim.AdamW
    return [
        predicted_and_measured(graph, plan, batch(plan.global_batch), adam, 2.0) for plan in plans
    ]


def peaks_of_gpt2(
    cases: Sequence[tuple[bool, str]],
) -> list[tuple[float, MeasuredMemory, float]]:
    """The same of a small GPT-2 with checkpoints: whether they are reentrant, and schedules."""
    join()
    tokens, _ = batch()
    example = {"input_ids": tokens, "labels": tokens}
    found = []
    for reentrant, schedule in cases:
        torch.manual_seed(0)
        model: Any = models.gpt2(0.1, **GPT2)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        graph = capture_model(model, example)
        plan = plan_of(
            len(graph.layer_names), (1, 1), schedule, micro_batches=MICRO_BATCHES, rows=ROWS
        )
        found.append(predicted_and_measured(graph, plan, example, torch.optim.AdamW, 2.0))
    return found


def by_block_and_kept(name: str) -> tuple[float, float, float, float]:
    """For a model on two stages: predicted and measured peak by block, measured peak where all is
    kept, and by how much the losses of two steps differ at most."""
    join()
    tokens, _ = batch()
    example = {"input_ids": tokens, "labels": tokens}
    torch.manual_seed(0)
    drops = {"resid_pdrop": 0.3}
    model = models.llama(**LLAMA) if name == "llama" else models.gpt2(0.1, **GPT2 | drops)
    graph = capture_model(model, example, granularity="block")
    first = {key: value.clone() for key, value in model.state_dict().items()}
    kept = plan_of(len(graph.layer_names), (1, 1), "gpipe", micro_batches=MICRO_BATCHES, rows=ROWS)
    losses: list[tuple[float, float]] = []
    peaks: list[float] = []
    plans = (with_recompute(kept, False, by_block=True), kept)
    for plan in plans:
        model.load_state_dict(first)
        with Pipeline(graph, example, plan=plan, optimizer=torch.optim.AdamW) as pipe:
            pipe.step(example)
            before = pipe.step(example).loss
            with pipe.measuring_memory() as memory:
                losses.append((before, pipe.step(example).loss))
            peaks.append(memory.peak_bytes)
            rank = pipe.rank
            pipe.close(gather=True)
    predicted = predict(graph, plans[0], example, 2.0).peak_memory_bytes[rank]
    differ = max(abs(one - other) for one, other in zip(*losses, strict=True))
    return predicted, peaks[0], peaks[1], differ


def state_of_process() -> dict[str, int]:
    """What would grow if a step left something behind."""
    found, objects = held(), gc.get_objects()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in objects)
    return {**found, "tensors": tensors, "objects": len(objects)}


def settled_state(tensors: int) -> dict[str, int]:
    """The state once at most ``tensors`` tensors live, or after ten seconds.

    Gloo's thread lets go of a sum's tensors a moment after the wait for it has ended: later, where
    the core is busy. A tensor that a step leaves behind stays.
    """
    end = time.monotonic() + 10
    while True:
        state = state_of_process()
        if state["tensors"] <= tensors or time.monotonic() > end:
            return state
        del state
        time.sleep(0.05)


def growth(
    schedules: Sequence[str], transport: Any, steps: int, warm_up: int
) -> dict[str, dict[str, int]]:
    """How much each figure of `state_of_process` grows over ``steps`` steps, by schedule."""
    join()
    found: dict[str, dict[str, int]] = {}
    for schedule in schedules:
        torch.manual_seed(0)
        graph = capture_model(Model(2), batch(3), loss=nn.functional.cross_entropy)
        plan = plan_of(
            len(graph.layer_names), (1, 1), schedule, recompute=schedule == "gpipe", rows=2
        )
        rows = plan.global_batch
        # Batches of another size have another cut of their own, made once.
        batches = [batch(rows), batch(rows - 1), batch(rows)]
        with Pipeline(
            graph,
            batches[0],
            plan=plan,
            optimizer=torch.optim.AdamW,
            safety=Safety(transport=transport),
        ) as pipe:
            for step in range(warm_up + steps):
                if step == warm_up:
                    before = state_of_process()
                pipe.step(batches[step % len(batches)])
            after = settled_state(before["tensors"])
        found[schedule] = {name: after[name] - before[name] for name in before}
    return found


def peaks_by_micro_batches(counts: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Peak bytes of a step and of an evaluation over Gloo, by the number of micro-batches."""
    join()
    graph = graph_of_model()
    found: dict[int, tuple[float, float]] = {}
    for count in counts:
        plan = plan_of(len(graph.layer_names), (1, 1), "1f1b", micro_batches=count, rows=ROWS)
        example = batch(plan.global_batch)
        with Pipeline(
            graph, example, plan=plan, safety=Safety(transport="process-groups"), timeout_s=100
        ) as pipe:
            peaks: list[float] = []
            for act in (pipe.step, pipe.evaluate):
                for _ in range(2):  # in both steps outputs are kept, to compare losses
                    act(example)
                with pipe.measuring_memory() as memory:
                    act(example)
                peaks.append(memory.peak_bytes)
        found[count] = peaks[0], peaks[1]
    return found
