"""What the worker processes of the tests of compared losses run."""

from dataclasses import replace

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import RunFailed
from penstock.plan.plan import Plan

ROWS = 12
now = {"step": 0}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).double()


def batches(count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(ROWS, 6, generator=generator, dtype=torch.float64),
            torch.randint(4, (ROWS,), generator=generator),
        )
        for _ in range(count)
    ]


def changing(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(o, y) + 0.1 * o.square().sum() / len(o)
    return loss + 0.3 * o.abs().mean() if now["step"] >= 2 else loss


def without_path(graph: LayerGraph) -> LayerGraph:
    """A graph whose runs do not compare the path of the loss, which would find it out, too."""
    parts = replace(graph.recorded.parts, path={})
    return replace(graph, recorded=replace(graph.recorded, parts=parts))


def run_checked(plan: Plan) -> tuple[bool, str]:
    """Whether the first two steps were compared, and how the fourth is refused."""
    dist.init_process_group("gloo")
    graph = without_path(capture_model(net(), batches()[0], loss=changing))
    said: list[str] = []
    try:
        with Pipeline(
            graph, batches()[0], plan=plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
        ) as pipe:
            pipe.print_with(said.append)
            for step, batch in enumerate(batches()):
                now["step"] = step
                pipe.step(batch)
    except RunFailed as refusal:
        return not any("not compared" in line for line in said), str(refusal)
    return False, "not refused"
