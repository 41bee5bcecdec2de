"""The dimensions that vary, found in examples."""

from typing import Any

import pytest
import torch

from penstock.capture.batch.found_lengths import find_dynamic
from penstock.capture.batch.layout import layout_of
from penstock.errors import BadInput


def words(samples: int, length: int, *more: int) -> torch.Tensor:
    return torch.zeros(samples, length, *more)


def test_dimensions_that_differ_alike_have_one_name_and_the_samples_have_none() -> None:
    batches = [
        {"tokens": words(rows, n), "labels": words(rows, n), "picture": words(rows, 8, 8)}
        for rows, n in ((4, 16), (3, 9), (4, 30))
    ]
    assert find_dynamic(batches) == {"tokens": {1: "length"}, "labels": {1: "length"}}


def test_dimensions_that_differ_apart_are_named_after_their_tensors() -> None:
    batches = [
        ({"in": words(4, n), "seen": words(4, n, n)}, words(4, m)) for n, m in ((5, 7), (6, 6))
    ]
    dynamic = find_dynamic(batches)
    assert dynamic == {
        (0, "in"): {1: "0.in length"},
        (0, "seen"): {1: "0.in length", 2: "0.in length"},
        1: {1: "1 length"},
    }
    assert layout_of(batches[0], dynamic).example_lengths == (5, 7)


def test_nothing_that_differs_and_a_batch_that_is_a_tensor() -> None:
    assert find_dynamic([words(4, 5), words(2, 5)]) == {}
    found = find_dynamic([words(4, 5), words(4, 6)])
    assert found == {(): {1: "length"}}
    assert layout_of(words(4, 5), found).example_lengths == (5,)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([words(4, 5)], "1 batch was given to find the dimensions that vary, which takes two"),
        ([{"a": words(4, 5)}, {"b": words(4, 6)}], "batch 1 is not made of the same entries"),
        ([{"a": words(4, 5)}, {"a": words(4, 5, 2)}], r"batch\['a'\] has shape \(4, 5, 2\)"),
        ([words(4, 5), words(4, 6).long()], r"of torch.int64 in batch 1"),
    ],
)
def test_batches_that_are_not_made_alike_are_refused(batches: list[Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        find_dynamic(batches)
