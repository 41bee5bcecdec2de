"""From a model and a plan to the stage that this rank holds."""

from typing import Literal

from torch import nn

from penstock.capture.layer_graph import Batch, LayerGraph, LossFunction, StageProgram
from penstock.capture.materialise import materialise
from penstock.capture.trace import capture_model
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.iteration import place_of
from penstock.runtime.runnable import check_runnable
from penstock.runtime.world import World

__all__ = ["build_stage", "check_plan_fits", "graph_of"]


def graph_of(
    model: nn.Module | LayerGraph,
    batch: Batch,
    loss: LossFunction | None,
    granularity: Literal["block", "module", "operator"],
) -> LayerGraph:
    """The captured model; what has been captured already is taken as it is."""
    if isinstance(model, nn.Module):
        return capture_model(model, batch, loss=loss, granularity=granularity)
    if loss is not None:
        raise BadInput(
            "a captured model has its loss already, but loss=... was given too; give it to "
            "capture_model only"
        )
    return model


def check_plan_fits(plan: Plan, graph: LayerGraph, world: World) -> None:
    """Raise `BadInput` where plan, model and processes disagree."""
    check_runnable(plan)
    layers = plan.stages[-1].layers.stop
    if layers != len(graph.layer_names):
        raise BadInput(
            f"the plan covers {layers} layers, the model {graph.name} has "
            f"{len(graph.layer_names)}; plan again for this model and granularity"
        )
    needed = max(plan.devices) + 1
    if needed > world.size:
        used = len(plan.devices)
        counted = f"{used} devices" if used == needed else f"devices up to number {needed - 1}"
        raise BadInput(
            f"the plan uses {counted} but {world.size} workers run; start with torchrun "
            f"--nproc-per-node {needed} or plan again"
        )


def build_stage(
    graph: LayerGraph,
    plan: Plan,
    world: World,
    model: nn.Module | LayerGraph,
    seed: int,
) -> StageProgram | None:
    """The module of this rank's stage with its tensors on this rank's device."""
    place = place_of(plan, world.rank)
    if place is None:
        return None
    program = graph.stage(plan.stages[place.stage].layers)
    module = program.module
    on_meta = any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    if on_meta:
        if not isinstance(model, nn.Module):
            raise BadInput(
                f"the model {graph.name} was captured on the meta device; give Pipeline the model "
                f"itself, so that its stages can be initialised"
            )
        materialise(program, device=world.device, seed=seed, model=model)
    else:
        module.to(world.device)
    return program
