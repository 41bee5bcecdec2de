"""Batches: what is accepted, and what every later batch is held to."""

from collections import UserDict

import pytest
import torch

from penstock.capture.batch.layout import layout_of, layouts_of
from penstock.errors import BadInput


def _batch(rows=3, words=6):
    return {"x": torch.zeros(rows, words, dtype=torch.long), "y": (torch.zeros(rows), None)}


def test_leaves_come_in_a_fixed_order_whatever_the_order_of_keys():
    layout = layout_of(_batch())
    batch = _batch(5)
    turned = {"y": batch["y"], "x": batch["x"]}
    assert [t.dtype for t in layout.flatten(turned)] == [torch.long, torch.float32]
    assert [leaf.name for leaf in layout.leaves] == ["batch['x']", "batch['y'][0]"]


def test_mappings_such_as_tokeniser_output_are_dicts():
    layout = layout_of(UserDict({"x": torch.zeros(2, 3)}))
    assert layout.rebuild({0: torch.ones(1)}) == {"x": torch.ones(1)}


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (_batch(words=7), r"batch\['x'\] .*dimension 1 is 7, but was 6 .*other_examples"),
        ({"x": torch.zeros(3, 6), "y": _batch()["y"]}, r"batch\['x'\].*float32.*int64"),
        ({"x": _batch()["x"]}, r"dict of \['x'\].*\['x', 'y'\]"),
        ({**_batch(), "y": (torch.zeros(3), 1)}, r"batch\['y'\]\[1\] is 1, but was None"),
        ({**_batch(), "y": (torch.zeros(2), None)}, r"unequal numbers of samples"),
        (_batch(rows=0), "0 samples"),
        ([torch.zeros(3)], "a list"),
        ({**_batch(), "x": torch.zeros(3, 6, 1, dtype=torch.long)}, "2 dimensions"),
    ],
)
def test_a_batch_unlike_the_example_is_refused(batch, words):
    with pytest.raises(BadInput, match=words):
        layout_of(_batch()).flatten(batch)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, "no tensors"),
        (torch.tensor(1.0), "has samples along dimension 0"),
        (object(), "a object, has no tensors"),
        (["a.png", 3], "the example batch, a list, has no tensors"),
    ],
)
def test_an_example_that_cannot_be_a_batch_is_refused(batch, words):
    with pytest.raises(BadInput, match=words):
        layout_of(batch)


def _patches(samples, rows=4):
    return {"patches": torch.arange(samples * rows * 3.0).view(-1, 3), "y": torch.zeros(samples)}


def test_a_tensor_with_several_rows_for_each_sample_has_the_samples_first():
    layout = layout_of(_patches(2))
    assert [leaf.rows for leaf in layout.leaves] == [4, 1]
    assert layout.batch_size == 2
    batch = _patches(5)
    patches, y = layout.flatten(batch)
    assert patches.shape == (5, 4, 3)
    assert torch.equal(patches[3], batch["patches"][12:16])
    given = layout.rebuild({0: patches[1:3], 1: y[1:3]})
    assert torch.equal(given["patches"], batch["patches"][4:12])
    assert layout.flatten(_patches(1))[0].shape == (1, 4, 3)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (_patches(3, rows=5), r"\['patches'\] 15 of 4 a sample, .*'y'\] 3\)"),
        ({**_patches(2), "patches": torch.zeros(7, 3)}, r"\['patches'\] 7 of 4 a sample"),
        ({**_patches(2), "y": torch.zeros(8)}, "unequal numbers of samples"),
        (_patches(0), "0 samples"),
    ],
)
def test_rows_are_those_of_the_example(batch, words):
    with pytest.raises(BadInput, match=words):
        layout_of(_patches(2)).flatten(batch)


def test_part_of_a_sample_is_refused():
    with pytest.raises(BadInput, match=r"'patches'\] is of 7 rows, .* of 4 rows for each sample"):
        layout_of(_patches(2)).part("patches").flatten({"patches": torch.zeros(7, 3)})


def test_one_sample_does_not_tell_how_many_rows_belong_to_it():
    found = [[leaf.rows for leaf in layout.leaves] for layout in layouts_of(_patches(1))]
    assert found == [[1, 0]]


def test_the_rows_of_one_sample_can_be_said():
    layout = layout_of(_patches(1), rows={"patches": 4})
    assert layout.batch_size == 1
    assert layout.flatten(_patches(3))[0].shape == (3, 4, 3)


def test_all_tensors_can_have_several_rows():
    pairs = torch.zeros(6, 5), torch.zeros(6)
    assert layout_of(pairs).batch_size == 6
    layout = layout_of(pairs, rows={0: 2, 1: 2})
    assert layout.batch_size == 3
    assert [leaf.shape for leaf in layout.flatten(pairs)] == [(3, 2, 5), (3, 2)]
    with pytest.raises(BadInput, match=r"batch\[0\] is of 5 rows, .* of 2 rows for each sample"):
        layout.flatten((torch.zeros(5, 5), torch.zeros(5)))
    assert layout_of(torch.zeros(6, 5), rows={(): 3}).batch_size == 2


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"patches": 3}, r"rows gives batch\['patches'\] 3 rows for each sample, but it has 8"),
        ({"patches": -1}, r"'patches'\] -1 rows"),
        ({"patches": 2.0}, r"'patches'\] 2.0 rows .* whole number"),
        ({"patches": True}, r"'patches'\] True rows"),
        ({"patches": 0, "y": 0}, "has samples along dimension 0"),
        ({"pixels": 4}, r"rows names 'pixels', but .* its tensors are batch\['patches'\]"),
    ],
)
def test_rows_that_the_example_does_not_have_are_refused(rows, words):
    with pytest.raises(BadInput, match=words):
        layout_of(_patches(2), rows=rows)


def test_lengths_of_such_a_tensor_may_not_vary():
    with pytest.raises(BadInput, match=r"'patches'\], which has 4 rows for each sample"):
        layout_of(_patches(2), {"patches": {1: "length"}}, {"patches": 4})
