"""A rank of `meet_seldom.py`, under torchrun: plans, trains all in turns; rank 0 writes the rest.

meet_seldom_rank.py FOLDER TURNS TURN EVERY
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import log
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import AdamW, Optimizer

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.toml_file import read_cluster
from penstock.document import json_text, write_text
from penstock.examples.gpt_text import Gpt, next_byte_loss, windows
from penstock.measure.layer_times import measure_profile, measure_step_s_per_byte
from penstock.measure.workers import median_profile
from penstock.plan.plan import Plan, Stage
from penstock.planning.answers import find_plan
from penstock.planning.planning_problem import planning_problem
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.settings import Safety, Update
from penstock.simulate.score import make_score

LENGTH, ROWS, MICRO_BATCHES = 32, 2, 16
HELD_OUT = 8

Batch = tuple[torch.Tensor, torch.Tensor]


def adamw(parameters: Any) -> Optimizer:
    """The optimizer of all contenders."""
    return AdamW(parameters, lr=3e-3, weight_decay=0.01)


def graph_of() -> LayerGraph:
    """A fresh model, with equal weights every time."""
    torch.manual_seed(1)
    model = Gpt(length=LENGTH, width=96, blocks=4)
    return capture_model(model, next(batches(1)), loss=next_byte_loss, granularity="module")


def batches(rows: int, split: Any = "train") -> Iterator[Batch]:
    """Batches of text, the same for all."""
    for inputs, targets in windows(split, 0, 0, rows):
        yield inputs[:, :LENGTH].contiguous(), targets[:, :LENGTH].contiguous()


def found_plan(graph: LayerGraph, folder: Path) -> Plan:
    """What `search` finds for the ranks' median profile, on every rank."""
    module = graph.stage(range(len(graph.layer_names))).module
    step_s = measure_step_s_per_byte(module, adamw, shares_cores=True)
    example = next(batches(ROWS))
    own = measure_profile(graph, example, repeats=7, step_s_per_byte=step_s, shares_cores=True)
    profiles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(profiles, own)
    chosen: list[Any] = [None]
    if dist.get_rank() == 0:
        problem = planning_problem(
            median_profile(profiles),
            read_cluster(folder / "hosts.toml"),
            ROWS * MICRO_BATCHES,
            micro_batch_size=ROWS,
            planner="search",
            recompute="off",
        )
        chosen = [find_plan(problem, "search", make_score(problem))]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def two_pipelines(layers: int) -> Plan:
    """A pipeline of two even stages on each host."""
    half, slices = layers // 2, (ROWS, ROWS)
    stages = Stage(range(half), (0, 2), slices), Stage(range(half, layers), (1, 3), slices)
    return Plan(stages, MICRO_BATCHES // 2, 2 * ROWS, "1f1b")


@dataclass
class Contender:
    """A pipeline in training, the seconds of its turns, and the held-out loss after each."""

    pipe: Pipeline
    batches: Iterator[Batch]
    seconds: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])

    def turn(self, steps: int) -> None:
        """Train for some steps, when all ranks are ready; then one model is evaluated."""
        dist.barrier()
        begun = perf_counter()
        for batch in islice(self.batches, steps):
            self.pipe.step(batch)
        self.pipe.meet()
        dist.barrier()
        self.seconds.append(perf_counter() - begun)
        given = islice(batches(ROWS * MICRO_BATCHES, "held-out"), HELD_OUT)
        self.losses.append(sum(self.pipe.evaluate(batch).loss for batch in given) / HELD_OUT)

    def seconds_to(self, loss: float) -> float | None:
        """Seconds of training until the held-out loss is that low, between turns in proportion."""
        before, passed = log(256), 0.0  # of guessed bytes
        for seconds, after in zip(self.seconds, self.losses, strict=True):
            if after <= loss:
                return passed + seconds * (before - loss) / (before - after)
            before, passed = after, passed + seconds
        return None


def main() -> None:
    """See the module."""
    folder, (turns, turn, every) = Path(sys.argv[1]), map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    searched = found_plan(graph_of(), folder)
    pair = two_pipelines(len(graph_of().layer_names))
    diloco = Update(meet_every=every, outer_learning_rate=0.7, outer_momentum=0.9)
    plans = {
        "search": (searched, Update()),
        "two pipelines, summed in every step": (pair, Update()),
        "two pipelines, mean": (pair, Update(meet_every=every)),
        "two pipelines, DiLoCo": (pair, diloco),
    }
    safety = Safety(transport="process-groups")
    contenders = {
        name: Contender(
            Pipeline(
                graph_of(),
                plan,
                next(batches(ROWS * MICRO_BATCHES)),
                optimizer=adamw,
                clip_norm=1.0,
                verify="off",
                update=update,
                safety=safety,
            ),
            batches(ROWS * MICRO_BATCHES),
        )
        for name, (plan, update) in plans.items()
    }
    for _ in range(turns):
        for contender in contenders.values():
            contender.turn(turn)
    loss = contenders["search"].losses[2 * turns // 3 - 1]
    found = {
        name: {
            "steps_per_s": turn / median(c.seconds),
            "faster_than_search": median(
                theirs / own
                for theirs, own in zip(contenders["search"].seconds, c.seconds, strict=True)
            ),
            "seconds": c.seconds,
            "held_out_losses": c.losses,
            "seconds_to_equal_loss": c.seconds_to(loss),
        }
        for name, c in contenders.items()
    }
    if dist.get_rank() == 0:
        stages = [[s.layers.start, s.layers.stop, *s.devices] for s in searched.stages]
        bytes_ = sum(p.numel() * 4 for p in Gpt(length=LENGTH, width=96, blocks=4).parameters())
        about = {
            "searched": stages,
            "schedule": searched.schedule,
            "parameter_bytes": bytes_,
            "loss": loss,
        }
        write_text(folder / "found.json", json_text({**about, "contenders": found}))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
