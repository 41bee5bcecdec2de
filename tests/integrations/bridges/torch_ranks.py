"""Started by torchrun: runs exported plans in torch's pipelines, and prints where results differ.

torchrun --nproc-per-node 2 tests/integrations/bridges/torch_ranks.py FOLDER FRONT_END NAME ...

Each ``FOLDER/NAME`` holds a plan and its layout for torch. All numbers are in float64. Torch's
stages are those of ``examples/exported_plan.py``, made from the module names of the layout, or with
``traced`` those of torch's own front end at the split points of the layout.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

sys.path.append(str(Path(__file__).parents[2]))

from scripts import script_at

from penstock.capture.capture import capture_model
from penstock.plan.json_file import read_plan
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline

example = script_at("examples/exported_plan.py", "exported_plan")

TOLERANCE = 1e-13
Gradients = dict[str, torch.Tensor]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Sixteen samples, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(example.WORDS, (16, example.LENGTH + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


def whole_model() -> nn.Module:
    """The model with the same weights on every rank."""
    torch.manual_seed(5)
    return example.Gpt().double()


def plain(rows: int) -> tuple[list[float], Gradients]:
    """Losses of the micro-batches, and the gradients of their mean, of the model left whole."""
    model, (words, target) = whole_model(), batch()
    losses = [
        example.loss(model(part), aim)
        for part, aim in zip(words.split(rows), target.split(rows), strict=True)
    ]
    torch.stack(losses).mean().backward()
    return [float(x.detach()) for x in losses], gradients_of(model)


def gradients_of(module: nn.Module) -> Gradients:
    """The gradients by name."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def in_torch(layout_file: Path, front_end: str) -> tuple[list[float], Gradients, list[list[str]]]:
    """What torch's runtime finds with the exported layout, and the actions that it executed."""
    if front_end == "traced":
        schedule, modules = traced(layout_file)
    else:
        schedule, modules = example.schedule_of(whole_model(), layout_file)
    losses = [float(x.detach()) for x in example.step(schedule, modules, *batch())]
    found: Gradients = {}
    for module in modules.values():
        found |= gradients_of(module)
    actions = [
        [str(action) for action in order if action.is_compute_op]
        for order in schedule.pipeline_order_with_comms.values()
    ]
    return losses, found, actions


def traced(layout_file: Path) -> tuple[_PipelineScheduleRuntime, dict[int, nn.Module]]:
    """The stages that torch's own front end cuts at the split points."""
    layout = json.loads(layout_file.read_text())
    rows = len(batch()[0]) // layout["n_microbatches"]
    spec = dict.fromkeys(layout["split_points"], SplitPoint.BEGINNING)
    pipe = pipeline(whole_model(), (batch()[0][:rows],), split_spec=spec)
    assert pipe.num_stages == len(layout["stages"])
    stages = [
        pipe.build_stage(stage, torch.device("cpu"))
        for stage, rank in enumerate(layout["stage_to_rank"])
        if rank == dist.get_rank()
    ]
    schedule = _PipelineScheduleRuntime(stages, layout["n_microbatches"], loss_fn=example.loss)
    schedule._load_csv(str(layout_file.with_name(layout["schedule_csv"])))
    return schedule, {stage.stage_index: stage.submod for stage in stages}


def in_penstock(folder: Path) -> tuple[float, Gradients]:
    """The loss and the gradients of Penstock's own pipeline on the same plan."""
    plan, model = read_plan(folder / "plan.json"), whole_model()
    words, target = batch()
    rows = plan.micro_batch_size
    sample = (words[:rows], target[:rows])
    graph = capture_model(model, sample, loss=example.loss, granularity="block")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Pipeline(
        graph,
        (words, target),
        plan=plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        safety=Safety(transport="process-groups"),
    ) as pipe:
        loss = pipe.step((words, target)).loss
        own = {name: before[name] - p.detach() for name, p in pipe.named_parameters()}
    return loss, own


def differences(found: Gradients, wanted: Gradients, who: str) -> list[str]:
    """The gradients that are not those of the whole model."""
    return [
        f"{who}: gradient of {name} is off by {(found[name] - wanted[name]).abs().max():.1e}"
        for name in found
        if not torch.allclose(found[name], wanted[name], rtol=1e-9, atol=TOLERANCE)
    ]


def checked(folder: Path, front_end: str) -> dict[str, Any]:
    """What this rank sees of one plan."""
    plan = read_plan(folder / "plan.json")
    wanted_losses, wanted = plain(plan.micro_batch_size)
    losses, found, actions = in_torch(folder / "layout.json", front_end)
    loss, own = in_penstock(folder)
    wrong = differences(found, wanted, "torch") + differences(own, wanted, "penstock")
    if losses and max(abs(a - b) for a, b in zip(losses, wanted_losses, strict=True)) > TOLERANCE:
        wrong.append(f"torch: losses {losses}, not {wanted_losses}")
    if abs(loss - sum(wanted_losses) / len(wanted_losses)) > TOLERANCE:
        wrong.append(f"penstock: loss {loss}")
    return {
        "wrong": wrong,
        "losses": len(losses),
        "torch": sorted(found),
        "penstock": sorted(own),
        "all": sorted(wanted),
        "actions": actions,
    }


def main(folder: str, front_end: str, *names: str) -> None:
    """Check each plan; rank 0 prints what all ranks saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own = {name: checked(Path(folder) / name, front_end) for name in names}
    everywhere: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    if dist.get_rank() == 0:
        print(json.dumps(everywhere))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
