"""What the worker processes of the test of a step's walk run."""

import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import penstock
from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.transport.transport import TransportChoice

SOURCE = Path(penstock.__file__).parent


def two_stages(
    schedule: str, transport: TransportChoice
) -> tuple[Pipeline, tuple[torch.Tensor, torch.Tensor]]:
    """A pipeline of a stage on each of two devices, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = (torch.randn(4, 4), torch.randint(3, (4,)))
    graph = capture_model(model, batch, loss=nn.CrossEntropyLoss())
    layers = len(graph.layer_names)
    cuts = range(layers // 2), range(layers // 2, layers)
    plan = Plan(tuple(Stage(cut, (n,), (2,)) for n, cut in enumerate(cuts)), 2, 2, schedule)
    pipe = Pipeline(
        graph,
        batch,
        plan=plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        verify="off",
        safety=penstock.Safety(transport=transport),
    )
    return pipe, batch


def entered_by_a_later_step() -> set[str]:
    """The files of the package, on this rank, of which a function is called, in any thread."""
    files: set[str] = set()
    steps = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if steps == 1 and event == "call" and path.is_relative_to(SOURCE):
            files.add(path.relative_to(SOURCE).as_posix())

    threading.setprofile(note)
    pipe, batch = two_stages("1f1b", "process-groups")
    with pipe:
        for _ in range(4):  # among them those whose losses are compared
            pipe.step(batch)
        sys.setprofile(note)
        steps = 1
        pipe.step(batch)
        steps = 2
    sys.setprofile(None)
    return files


def loaded_by_steps(schedule: str, transport: TransportChoice) -> set[str]:
    """The modules of the runtime that are loaded when this process has taken two steps."""
    pipe, batch = two_stages(schedule, transport)
    with pipe:
        for _ in pipe.stream([batch, batch]):
            pass
    return {name for name in sys.modules if name.startswith("penstock.runtime")}


if __name__ == "__main__":
    chosen: Any = sys.argv[1:]
    if "in-process" in chosen:
        found = loaded_by_steps(*chosen)
    else:
        found = set[str]().union(*launch_workers(loaded_by_steps, tuple(chosen), workers=2))
    print(json.dumps(sorted(found)))
