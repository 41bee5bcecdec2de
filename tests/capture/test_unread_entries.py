"""Entries of a batch without tensors: file names, counters, objects of the user's."""

import math
import warnings
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from plain_training import in_two_stages
from torch import nn
from torch.nn import functional

from penstock.capture.batch.found_lengths import find_dynamic
from penstock.capture.capture import capture_model
from penstock.errors import BadInput


class Net(nn.Module):
    def __init__(self, read=lambda entries: 1.0):
        super().__init__()
        self.first, self.last, self.read = nn.Linear(4, 6), nn.Linear(6, 3), read

    def forward(self, x, **others):
        return self.last(torch.tanh(self.first(x)) * self.read(others))


def loss(scores, batch):
    return functional.cross_entropy(scores, batch["y"])


def batch_of(number=0, samples=4, **others):
    names = [f"image-{number}-{k}.png" for k in range(samples)]
    x, y = torch.randn(samples, 4), torch.arange(samples) % 3
    return {"x": x, "y": y, "file": names, "epoch": number, "none": None} | others


def captured(read=lambda entries: 1.0, loss=loss, **others):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture_model(Net(read), batch_of(**others), loss=loss)


def test_what_nothing_reads_is_named_in_one_warning_and_may_be_anything_later():
    batch = batch_of(where={"camera": object(), "shot": b"3"})
    with pytest.warns(UserWarning) as told:
        graph = capture_model(Net(), batch, loss=loss)
    (line,) = [str(warning.message) for warning in told]
    assert line.endswith(": batch['file'], batch['epoch'], batch['where']")
    later = batch_of(7, 6, where=None)
    assert [leaf.shape[0] for leaf in graph.batch_leaves(later)] == [6, 6]
    with pytest.raises(BadInput, match=r"batch\['epoch'\] is a tensor, but was none"):
        graph.batch_leaves(batch_of(epoch=torch.zeros(4), where=None))


def test_a_warning_is_given_by_the_first_process_only(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    capture_model(Net(), batch_of(), loss=loss)


def test_steps_and_evaluation_with_other_names_are_those_of_the_module():
    graph = captured()
    model, pipe = graph.model, in_two_stages(graph, batch_of(), rows=2)
    for number in (3, 4):
        batch = batch_of(number)
        expected = float(loss(model(batch["x"]), batch).detach())
        assert pipe.evaluate(batch).loss == pytest.approx(expected, rel=1e-6)


def test_outputs_need_neither_names_nor_targets():
    graph = captured().without_loss()
    assert list(graph.known_leaves({"x": torch.randn(2, 4)})) == [0]
    assert list(graph.known_leaves(batch_of(5))) == [0, 1]


@pytest.mark.parametrize(
    "read",
    [
        lambda entries: 1.0 + entries["epoch"],
        lambda entries: math.exp(entries["epoch"]),
        lambda entries: float(torch.full((), entries["epoch"])),
        lambda entries: len(range(entries["epoch"])) + 1.0,
        lambda entries: 2.0 if entries["epoch"] == 3 else 1.0,
        lambda entries: float(f"{entries['epoch']}"),
        lambda entries: {3: 2.0}[entries["epoch"]],
    ],
)
def test_a_number_that_is_read_is_a_constant(read):
    graph = captured(read, epoch=3)
    assert [entry.name for entry in graph.layout.unread] == ["batch['file']"]
    graph.batch_leaves(batch_of(epoch=3))
    with pytest.raises(BadInput, match=r"batch\['epoch'\] is 4, but was 3 at capture"):
        graph.batch_leaves(batch_of(epoch=4))


def test_sizes_in_a_list_are_constant_if_they_are_read():
    graph = captured(lambda entries: float(entries["size"][0]), size=[2, 3])
    graph.batch_leaves(batch_of(size=[2, 3]))
    with pytest.raises(BadInput, match=r"batch\['size'\]\[1\] is 4, but was 3"):
        graph.batch_leaves(batch_of(size=[2, 4]))


def swallowed(entries, name="file", number=len):
    try:
        return float(number(entries[name]))
    except Exception:
        return 1.0


@pytest.mark.parametrize(
    "read",
    [
        lambda entries: float(len(entries["file"])),
        lambda entries: sum(1.0 for name in entries["file"]),
        lambda entries: 2.0 if "a.png" in entries["file"] else 1.0,
        swallowed,
    ],
)
def test_names_that_forward_reads_are_refused(read):
    with pytest.raises(BadInput, match=r"batch\['file'\] is a list, and test_unread.*py:\d+ reads"):
        captured(read)


def test_a_number_is_a_constant_where_the_user_catches_every_error():
    graph = captured(lambda entries: swallowed(entries, "epoch", float), epoch=2)
    assert [entry.name for entry in graph.layout.unread] == ["batch['file']"]


@pytest.mark.parametrize("labels", [np.zeros(4), iter([0, 1, 2, 0]), b"0120"])
def test_an_object_that_the_loss_reads_is_refused(labels):
    def of_object(scores, batch):
        return functional.cross_entropy(scores, torch.tensor(list(batch["labels"])).long())

    with pytest.raises(BadInput, match=r"batch\['labels'\] is a .*, and test_unread.*py:\d+ reads"):
        captured(loss=of_object, labels=labels)


def test_what_reads_an_entry_in_a_later_step_is_refused_there():
    model = Net()
    graph = captured()
    graph.program.model.read = lambda entries: 1.0 + entries["epoch"]
    leaves = dict(enumerate(graph.batch_leaves(batch_of())))
    with pytest.raises(BadInput, match=r"batch\['epoch'\] is a int, and test_unread"):
        graph.program.run(leaves)
    assert model.read({}) == 1.0


def test_code_that_looks_for_tensors_or_passes_entries_on_does_not_read():
    def of_tensors(scores, batch):
        for entry in batch.values():
            if isinstance(entry, str | float | Iterable) and not isinstance(entry, list):
                assert isinstance(entry, torch.Tensor)
            if hasattr(entry, "shape") or entry is None or callable(entry):
                assert entry is None or isinstance(entry, torch.Tensor)
        assert isinstance(batch["epoch"], int) and isinstance(batch["file"], list)
        return loss(scores, dict(batch))

    names = [entry.name for entry in captured(loss=of_tensors).layout.unread]
    assert names == ["batch['file']", "batch['epoch']"]


def test_a_unit_may_be_given_an_entry_that_it_does_not_read():
    class Named(nn.Linear):
        def forward(self, x, names, number):
            return super().forward(x)

    class Passing(Net):
        def __init__(self):
            super().__init__()
            self.first = Named(4, 6)

        def forward(self, x, y, file, epoch, none):
            return self.last(torch.tanh(self.first(x, file, number=epoch)))

    with pytest.warns(UserWarning, match=r"batch\['file'\], batch\['epoch'\]"):
        graph = capture_model(Passing(), batch_of(), loss=loss)
    assert graph.layer_names == ("first", "last", "loss")


def test_lengths_are_found_in_batches_with_other_names():
    batches = [batch_of(k, x=torch.zeros(4, 6 + k)) for k in range(2)]
    assert find_dynamic(batches) == {"x": {1: "length"}}
