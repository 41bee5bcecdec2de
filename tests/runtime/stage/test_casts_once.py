"""Under autocast all micro-batches in flight share one copy of each weight in the lower type."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.cluster.toml_file import local_cluster
from penstock.measure.layer_times import measure_profile
from penstock.measure.roofline import estimate_profile
from penstock.plan.plan import Plan, Stage
from penstock.runtime import engine
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.simulate.catalogue import Catalogue
from penstock.simulate.instances import StageUse
from penstock.torch_internals import TorchDispatchMode, storage_id

WIDTH, STAGES, MICRO_BATCHES = 48, 4, 4
SHAPES = (WIDTH, WIDTH)
FORMS = ("1f1b", "gpipe", "zb-h1", "1f1b again", "gpipe by block")


def model() -> Chain:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(*SHAPES, bias=False), nn.Tanh()) for _ in range(STAGES)]
    return Chain(layers, functional.mse_loss)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator)
    return draw(2 * MICRO_BATCHES, WIDTH), draw(2 * MICRO_BATCHES, WIDTH)


class Casts(TorchDispatchMode):
    """Notes the casts of tensors of a shape to bfloat16."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.made, self._shape = list[weakref.ref[Any]](), shape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        if is_cast and tuple(result.shape) == self._shape:
            self.made.append(weakref.ref(result.untyped_storage()))
        return result


def steps(form: str) -> tuple[list[torch.Tensor], int, int]:
    """The weights after two steps; casts and saved copies of weights in one more."""
    schedule, _, again = form.partition(" ")
    stages = tuple(
        Stage(
            range(k, k + 1 + (k == STAGES - 1)),
            (k,),
            (2,),
            recompute=again == "again",
            by_block=again == "by block",
        )
        for k in range(STAGES)
    )
    plan, own = Plan(stages, MICRO_BATCHES, 2, schedule), model()
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16 and tuple(tensor.shape) == SHAPES:
            saved[storage_id(tensor)] = tensor.detach()
        return tensor

    with Pipeline(
        own,
        batch(),
        plan=plan,
        optimizer=partial(AdamW, lr=0.01),
        autocast=torch.bfloat16,
        safety=Safety(transport="in-process"),
    ) as pipe:
        pipe.step(batch())
        pipe.step(batch())
        weights = [parameter.detach().clone() for parameter in own.parameters()]
        with (
            Casts(SHAPES) as casts,
            torch.autograd.graph.saved_tensors_hooks(note, lambda one: one),
        ):
            pipe.step(batch())
    return weights, len(casts.made), len(saved)


@pytest.mark.parametrize("form", FORMS)
def test_each_weight_is_cast_once_in_an_iteration(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, casts, saved = steps(form)
    monkeypatch.setattr(engine, "casts_kept", lambda *_: nullcontext())
    apart, casts_apart, saved_apart = steps(form)
    # The first layer needs no gradient of its input, so its weight is not saved.
    assert (saved, saved_apart) == (STAGES - 1, (STAGES - 1) * MICRO_BATCHES)
    assert casts_apart - casts == STAGES * (MICRO_BATCHES - 1)
    assert all(map(torch.equal, weights, apart))


@pytest.mark.parametrize("form", FORMS)
def test_what_a_stage_receives_is_not_kept(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    casts_kept, living, received = engine.casts_kept, list[int](), Casts((2, WIDTH))

    @contextmanager
    def counting(*given: Any) -> Iterator[None]:
        with casts_kept(*given), received:
            yield
            living.append(sum(ref() is not None for ref in received.made))

    monkeypatch.setattr(engine, "casts_kept", counting)
    steps(form)
    assert len(received.made) > MICRO_BATCHES
    assert not any(living)


@pytest.mark.parametrize("source", ["measured", "estimated"])
def test_a_profile_counts_the_copies_once(source: str) -> None:
    graph = capture_model(model(), batch())
    make = (
        measure_profile
        if source == "measured"
        else partial(estimate_profile, hardware_name="H100-80GB")
    )
    plain, cast = (make(graph, batch(), autocast=dtype) for dtype in (None, torch.bfloat16))
    sizes = [layer.cast_bytes for layer in cast.layers]
    # The first layer gets no gradient of its input, so its weight is not saved.
    assert sizes == [0, *[2 * WIDTH * WIDTH] * (STAGES - 1), 0]
    assert not any(layer.cast_bytes for layer in plain.layers)
    every = range(len(cast.layers))
    catalogue, stage = Catalogue(cast, local_cluster(1, 1, 1e9)), Stage(every, (0,), (2,))
    flushed, kept = (
        catalogue.stage(stage, StageUse(versions=versions)).replicas[0].memory
        for versions in (1, 2)
    )
    parameters = cast.parameter_bytes(every)
    assert kept.fixed_bytes - flushed.fixed_bytes == parameters - sum(sizes)
    assert kept.saved_bytes - flushed.saved_bytes == sum(sizes)
