"""States of loaders become JSON and come back equal; nothing else is kept, and no code is run."""

import json
from math import inf, nan
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadInput
from penstock.runtime.plain_values import from_json, to_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(KEYS, inner)
    ),
    max_leaves=20,
)


def through(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value, "it"))), "it")


@given(VALUES)
def test_plain_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    found = through(value)
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.Generator().manual_seed(1).get_state(),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([[1, 2], [3, 4]]).T,
        torch.zeros(0, 3),
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_tensors_come_back_to_the_last_bit(tensor: torch.Tensor) -> None:
    found = through({"of": (tensor,)})["of"][0]
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


def test_numbers_that_json_lacks() -> None:
    found = through([inf, -inf, nan])
    assert found[:2] == [inf, -inf]
    assert found[2] != found[2]


@pytest.mark.parametrize("value", [object(), {1, 2}, [lambda: 0], {"a": {"b": range(3)}}])
def test_other_objects_are_refused_when_they_are_saved(value: Any) -> None:
    with pytest.raises(BadInput, match=r"the loader holds a .*, which a checkpoint does not keep"):
        to_json(value, "the loader")


@pytest.mark.parametrize(
    "damaged",
    [
        {"$call": "os.system"},
        {"$tensor": {"dtype": "F32", "shape": [2], "data": "AAAA"}},
        {"$tensor": {"dtype": "X", "shape": [2], "data": ""}},
        {"$tensor": {"dtype": "F32", "shape": [-1], "data": ""}},
        {"$bytes": "?"},
        {"$pairs": [[1]]},
        {"$float": "seven"},
        {"$tuple": 7},
    ],
)
def test_what_was_not_written_is_refused(damaged: Any) -> None:
    with pytest.raises(BadInput, match="the place cannot be read"):
        from_json([damaged], "the place")
