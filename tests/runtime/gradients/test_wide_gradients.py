"""Gradients of bfloat16 weights that are summed in float32."""

import pytest
import torch
from runtime.gradients.wide_cases import CASES, batch_of, model_of, summed, wide_gradients

from penstock.errors import BadInput
from penstock.runtime.options import Update
from penstock.runtime.processes.launch import launch_workers


def test_the_optimizer_gets_what_a_loop_sums_in_float32() -> None:
    """To the last bit; or to one rounding, where a sum has another order."""
    for found in launch_workers(wide_gradients, workers=4, threads=1):
        assert list(found) == list(CASES)
        assert not any(found.values()), found


def test_sums_in_float32_are_nearer_to_those_in_float64() -> None:
    """What the weights' own type loses in 64 micro-batches; the gradients themselves are equal."""
    model, count = model_of("stages"), 64
    batch, rows = batch_of(4 * count, 0), [range(4 * n, 4 * n + 4) for n in range(count)]
    wide = summed(model, batch, rows)
    narrow = {name: torch.zeros_like(own, dtype=torch.bfloat16) for name, own in wide.items()}
    exact = {name: torch.zeros_like(own, dtype=torch.float64) for name, own in wide.items()}
    for own in rows:
        for name, gradient in summed(model, batch, [own]).items():
            narrow[name] += gradient.bfloat16()
            exact[name] += gradient.double()

    def error(found: dict[str, torch.Tensor]) -> float:
        away = sum(float((found[n].double() - exact[n]).square().sum()) for n in exact)
        return float((away / sum(float(e.square().sum()) for e in exact.values())) ** 0.5)

    rounded = error({name: own.bfloat16() for name, own in wide.items()})
    assert error(wide) < 1e-6
    assert rounded < 2**-8
    assert error(narrow) > 4 * rounded


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(BadInput, match=r"gradient_dtype is .*; it must be torch.float32"):
        Update(gradient_dtype=dtype)
