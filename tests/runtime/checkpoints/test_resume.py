"""A run that was killed and resumed ends with the weights of one that was not, to the last bit."""

import json
from pathlib import Path

import pytest
import torch
from runtime.checkpoints import resume_cases
from runtime.checkpoints.resume_cases import train_twice
from torch.utils.data import DataLoader

from penstock.errors import BadInput, RunFailed
from penstock.runtime.checkpoints.checkpoint import latest_checkpoint, read_state
from penstock.runtime.checkpoints.loader_state import (
    ResumableLoader,
    loader_from_text,
    loader_to_text,
)
from penstock.runtime.processes.launch import launch_workers


@pytest.mark.timeout(600)
def test_killed_and_resumed_is_bit_equal_to_uninterrupted(tmp_path: Path) -> None:
    def train(**options: object) -> dict[str, object]:
        return launch_workers(
            resume_cases.train_net_with, (tmp_path, options), workers=3, threads=1
        )[0]

    through = train()
    with pytest.raises(RunFailed):
        train(die_after=12)
    assert read_state(latest_checkpoint(tmp_path))["extra"] == {"note": "midway"}
    resumed = train(resume=True)
    assert resumed["steps"] == through["steps"] == 16
    assert resumed["losses"] == through["losses"][11:]
    assert through["weights"].keys() == resumed["weights"].keys()
    for name, tensor in through["weights"].items():
        assert torch.equal(tensor, resumed["weights"][name]), name


@pytest.mark.timeout(600)
def test_one_seed_gives_one_run(tmp_path: Path) -> None:
    first, again, other = launch_workers(train_twice, workers=3, threads=1)[0]
    assert first == again
    assert first != other


def loader(**options: object) -> ResumableLoader:
    generator = torch.Generator().manual_seed(4)
    data = torch.arange(10.0)
    return ResumableLoader(DataLoader(data, 3, shuffle=True, generator=generator, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("taken", range(10))
def test_a_loader_goes_on_with_the_next_batch(taken: int) -> None:
    whole, interrupted, resumed = loader(), loader(), loader()
    expected = [batch.tolist() for _ in range(3) for batch in whole]
    found: list[list[float]] = []
    place = loader_to_text(interrupted)
    while len(found) < taken:
        for batch in interrupted:
            found.append(batch.tolist())
            place = loader_to_text(interrupted)
            if len(found) == taken:
                break
    loader_from_text(resumed, json.loads(json.dumps(place)), "here")
    for _ in range(resumed.epoch, 3):
        found += [batch.tolist() for batch in resumed]
    assert found == expected
    assert resumed.epoch == 3


def test_skipped_batches_move_no_random_number_of_the_script() -> None:
    before, after = loader(), loader()
    next(iter(before))
    after.load_state_dict(before.state_dict())
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    next(iter(after))
    assert torch.equal(torch.rand(2), expected)


def test_a_loader_that_shuffles_by_the_global_generator_is_refused() -> None:
    with pytest.raises(BadInput, match="shuffles without a generator of its own"):
        ResumableLoader(DataLoader(torch.arange(4.0), shuffle=True))
    assert len(ResumableLoader(DataLoader(torch.arange(4.0)))) == 4


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (None, "holds no place in a loader"),
        ({"epoch": 1}, "holds a place of an earlier version"),
        ("?", "cannot be read"),
        ("UEs=", "cannot be read"),
    ],
)
def test_a_loaders_place_that_cannot_be_read_says_so(place: object, why: str) -> None:
    with pytest.raises(BadInput, match=f"checkpoint 'here' {why}"):
        loader_from_text(loader(), place, "here")


def test_a_loader_whose_state_is_not_plain_is_refused_when_it_is_saved() -> None:
    odd = loader()
    odd.state_dict = lambda: {"epoch": range(3)}  # type: ignore[method-assign]
    with pytest.raises(BadInput, match=r"the state of the ResumableLoader holds a .*range"):
        loader_to_text(odd)
