"""What cannot be right, or is found only when it happens, is named as what it is to the user."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from runtime import refusal_cases as cases
from runtime.refusal_cases import Net, alone, trained
from torch import nn

from penstock.capture.capture import capture_model
from penstock.runtime.processes.launch import launch_workers


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            lambda: trained(Net(cases.OverTheBatch())),
            "'between.mix' (MultiheadAttention) gives other results for 4 samples alone than for "
            "the same among 8, so samples (the first dimension of the batch) act on one another",
        ),
        (
            lambda: trained(Net(cases.Noisy())),
            "'between' (Noisy) gives other numbers when it runs again on the same batch: it draws "
            "from a generator of its own, or keeps a state",
        ),
        (cases.with_unequal_rows, "micro-batch 3 has 1 sample: give batches with 2 or more"),
        (cases.pruned_later, "Net has no 'one.weight' any more, which it had when it was captured"),
        (
            cases.counted_flops,
            "hooks for all modules (register_module_full_backward_hook, FlopCounterMode)",
        ),
        (cases.mixed, "index samples by numbers of the batch in the loop, not in forward"),
        (cases.bags, "is given offsets of the batch, which count from its first sample"),
        (cases.without_gradients, "step() is called within torch.no_grad()"),
        (
            lambda: trained(nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 2))),
            "'0.weight' of Sequential has no shape before its lazy module has run; run the model",
        ),
        (
            lambda: trained(Net(), make=lambda p: torch.optim.SparseAdam(list(p))),
            "optimizer SparseAdam does not work with the gradients of a pipeline",
        ),
        (
            lambda: trained(Net(), cases.reduced),
            "`dist.all_reduce(scores.detach().sum())`, but forward and loss run as in one process",
        ),
    ],
)
def test_the_refusal_names_the_cause(run: Callable[[], Any], words: str) -> None:
    assert words in run()


def test_a_constant_is_written_into_an_empty_tensor() -> None:
    expected = alone(cases.IntoOut(), cases.penalised)
    assert trained(cases.IntoOut(), cases.penalised) == pytest.approx(expected, rel=1e-10)


def test_gradients_scaled_by_frequency_are_said_to_be_those_of_micro_batches() -> None:
    model = cases.Table(nn.Embedding, scale_grad_by_freq=True).double()
    graph = capture_model(model, cases.batches()[0], loss=nn.functional.cross_entropy)
    assert graph.mixing.startswith("'table' divides gradients by frequencies in the batch")
    assert not isinstance(trained(model), str)


def test_a_normalised_weight_is_not_written_to() -> None:
    class Cosine(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ nn.functional.normalize(self.one.weight).T

    graph = capture_model(Cosine().double(), cases.batches()[0], loss=nn.functional.cross_entropy)
    assert not graph.written_parameters


@pytest.fixture(scope="module")
def found() -> Sequence[dict[str, Any]]:
    return launch_workers(cases.over_ranks, (), workers=2, threads=1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["scaled", "number of ranks", "shared table"])
def test_the_program_runs_as_in_one_process(found: Sequence[dict[str, Any]], name: str) -> None:
    expected = alone(cases.SharedTable() if name == "shared table" else Net())
    for rank in found:
        assert rank[name] == pytest.approx(expected, rel=1e-10)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["own group", "reduced"])
def test_a_collective_of_the_user_is_refused_at_once(
    found: Sequence[dict[str, Any]], name: str
) -> None:
    for rank in found:
        assert "torch.distributed.all_reduce() is called on rank " in rank[name]
        assert "refusal_cases.py:" in rank[name]
