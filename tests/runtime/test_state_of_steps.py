"""State that moves with every batch is that of the user's own program, at every step."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pipelines_of_any_plan import Pipeline
from runtime.state_cases import ALONE, ROWS, batches, compared, program_of
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.stage.building import check_plan_fits


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_losses_and_state_are_those_of_the_program(tmp_path: Path, micro_batches: int) -> None:
    for found in launch_workers(compared, (str(tmp_path), micro_batches), workers=2, threads=1):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_stages_of_one_process_keep_theirs(tmp_path: Path) -> None:
    found = compared(str(tmp_path), 1, "in-process")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize(("micro_batches", "replicas"), [(2, 1), (1, 2)])
def test_rows_that_go_on_from_the_last_batch_are_refused_in_slices(
    name: str, micro_batches: int, replicas: int
) -> None:
    model, loss = program_of(name)
    batch = batches()[0]
    graph = capture_model(model, batch, loss=loss)
    rows, layers = ROWS // micro_batches, range(len(graph.layer_names))
    sizes = (rows // replicas,) * replicas
    plan = Plan((Stage(layers, tuple(range(replicas)), sizes),), micro_batches, rows, "1f1b")
    words = r"'(hidden|three.kept|loss.counts)' .*_cases.py:\d+ `.*`.* 2 .* one (micro|worker)"
    with pytest.raises(BadInput, match=words):
        check_plan_fits(plan, graph, SimpleNamespace(size=2), may_idle=True)


def test_what_is_only_noted_is_not_carried() -> None:
    model, loss = program_of("rows that are noted")
    assert capture_model(model, batches()[0], loss=loss).recorded.carried == {}


def test_numbers_of_the_step_are_those_that_the_state_gives_now() -> None:
    """The weights of a mean are made of counts that each batch moves."""

    class Balanced(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counts", torch.ones(5, dtype=torch.float64))

        def forward(self, found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            weights = (1 / self.counts)[labels]
            self.counts = self.counts + torch.bincount(labels, minlength=5)
            errors = functional.cross_entropy(found, labels, reduction="none")
            return (errors * weights).sum() / weights.sum()

    model, _ = program_of("counter")
    model.after = None
    loss, data = Balanced(), batches()
    graph = capture_model(model, data[0], loss=loss)
    plan = Plan((Stage(range(len(graph.layer_names)), (0,), (ROWS,)),), 1, ROWS, "1f1b")
    with Pipeline(graph, data[0], plan=plan, safety=Safety(transport="in-process")) as pipe:
        found = [pipe.step(batch).loss for batch in data]
    own = Balanced()
    wanted = [own(model(x), y).item() for x, y in data]
    assert found == pytest.approx(wanted, rel=1e-9)
