"""Which entries of a batch all samples share: seen, tried, said, or asked for."""

import pytest
import torch
from plain_training import assert_pipeline_equals_plain
from runtime.shared_cases import LENGTH, Placed, batch_of
from torch import nn
from torch.nn import functional

from penstock.capture.batch.found_lengths import find_dynamic
from penstock.capture.capture import capture_model
from penstock.errors import BadInput, CaptureFailed


def rows_of(graph):
    return {leaf.name.split("'")[1]: leaf.rows for leaf in graph.layout.leaves}


SHARED = {"words": 1, "places": 0, "mask": 0, "scale": 0, "labels": 1}


# Six places are two for each of three samples, or shared by them; of four samples only shared.
@pytest.mark.parametrize("samples", [2, 3, 4, 8])
def test_what_all_samples_share_is_found_by_trial(samples):
    graph = capture_model(Placed().double(), batch_of(0, samples))
    assert rows_of(graph) == SHARED
    assert graph.batch_size == samples


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_gradients_are_those_of_the_whole_batch(micro_batches):
    graph = assert_pipeline_equals_plain(
        Placed().double(), batch_of(0, 4), micro_batches=micro_batches, tolerance=1e-12
    )
    assert graph.mixing == ""


def test_as_many_places_as_samples_are_shared_where_that_is_said():
    batch = batch_of(0, LENGTH)
    said = {"places": 0}
    assert rows_of(capture_model(Placed().double(), batch, rows=said)) == SHARED


class Offset(nn.Module):
    """Runs with offsets of one row and of two for each sample, and with all of them at once."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x, offsets):
        return self.last(torch.tanh(self.first(x)) + offsets.mean(0)).square().mean()


def test_where_both_readings_run_the_user_is_asked():
    batch = torch.randn(4, 3), torch.randn(8, 3)
    with pytest.raises(BadInput, match=r"rows=\{1: 2\} and with rows=\{1: 0\}; pass one of them"):
        capture_model(Offset(), batch)
    assert capture_model(Offset(), batch, rows={1: 0}).layout.shared == {1}
    assert capture_model(Offset(), batch, rows={1: 2}).layout.shared == set()


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 3)


def test_samples_that_would_act_on_one_another_are_not_taken_to_share():
    class Net(Last):
        def forward(self, patches, kinds):
            seen = self.last(patches).view(kinds.shape[0], -1, 3)
            return functional.cross_entropy(seen.mean(1), kinds)

    batch = torch.randn(4, 3), torch.zeros(1, dtype=torch.long)
    with pytest.raises(BadInput, match=r"not clear whether .* share batch\[1\].* rows=\{1: 0\}"):
        capture_model(Net(), batch)
    assert capture_model(Net(), batch, rows={0: 4}).batch_size == 1


def test_an_entry_that_nothing_reads_is_not_asked_about():
    batch = {"x": torch.randn(4, 3), "y": torch.randn(4, 3), "sizes": torch.ones(8, 2)}

    class Net(Last):
        def forward(self, x, y, sizes):
            return functional.mse_loss(self.last(x), y)

    assert rows_of(capture_model(Net(), batch)) == {"x": 1, "y": 1, "sizes": 2}


def test_unequal_tensors_that_do_not_fit_are_refused_with_what_was_tried():
    class Net(Last):
        def forward(self, x, kinds):
            return functional.cross_entropy(self.last(x), kinds)

    batch = torch.randn(4, 3), torch.zeros(3, dtype=torch.long)
    with pytest.raises(CaptureFailed, match=r"batch_size.*\(batch\[1\]: taken to be shared"):
        capture_model(Net(), batch)


def test_too_many_entries_that_may_be_shared_are_asked_for():
    batch = {f"x{i}": torch.ones(2, 3) for i in range(5)}
    batch |= {f"e{i}": torch.ones(4) for i in range(4)}

    class Net(nn.Module):
        def forward(self, **batch):
            raise AssertionError

    with pytest.raises(BadInput, match=r"at most 3 can be tried; say it with rows="):
        capture_model(Net(), batch)


def test_shared_entries_vary_with_a_length():
    batches = [batch_of(0, 4), batch_of(1, 4, length=9)]
    dynamic = find_dynamic(batches)
    expected = {"words": {1: "length"}, "places": {0: "length"}, "labels": {1: "length"}}
    assert dynamic == {**expected, "mask": {1: "length", 2: "length"}}
    graph = capture_model(Placed().double(), batches[0], dynamic=dynamic)
    leaves = graph.batch_leaves(batches[1])
    assert graph.lengths_of(dict(enumerate(leaves))) == (9,)
    with pytest.raises(BadInput, match=r"dimension 0 of batch\['places'\] is 7"):
        graph.batch_leaves({**batches[1], "places": torch.zeros(7, 2, dtype=torch.float64)})
