"""Messages come back equal, hold named classes only, and no bytes can do more than be refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime.processes.workers_under_test import gather_what_cannot_be_sent

from penstock.errors import BadInput, RunFailed
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.processes.typed_bytes import decode, encode


@dataclass(frozen=True)
class Spot:
    name: str
    at: tuple[int, ...]
    inner: "Spot | None" = None


class Pair(NamedTuple):
    left: int
    right: int


TENSORS = st.builds(
    lambda shape, dtype: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
LEAVES = (
    SCALARS
    | st.binary()
    | TENSORS
    | st.builds(Path, st.text("ab/", min_size=1))
    | st.sets(st.integers())
    | st.sampled_from([torch.float16, torch.int8])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.tuples(st.integers(), st.text()), inner)
        | st.builds(Spot, st.text(), st.lists(st.integers()).map(tuple), inner)
    ),
    max_leaves=12,
)


def plain(value: Any) -> Any:
    """A value in which tensors are equal if type, shape and all numbers are."""
    match value:
        case torch.Tensor():
            return (str(value.dtype), tuple(value.shape), value.tolist())
        case Spot():
            return ("Spot", value.name, value.at, plain(value.inner))
        case list() | tuple():
            return [type(value).__name__, *map(plain, value)]
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case _:
            return value


@given(VALUES)
def test_messages_come_back_equal_and_of_the_same_types(value: Any) -> None:
    found = decode(encode(value, (Spot,)), (Spot,))
    assert plain(found) == plain(value)
    assert type(found) is type(value)


@given(VALUES, st.data())
def test_changed_bytes_are_read_or_refused_in_one_line(value: Any, data: st.DataObject) -> None:
    message = encode(value, (Spot,))
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, len(message) - 1))
        message[place] = data.draw(st.integers(0, 255))
    message = message[: data.draw(st.integers(0, len(message)))]
    read_or_refused(message)


@given(st.binary())
def test_any_bytes_are_read_or_refused_in_one_line(text: bytes) -> None:
    whole = bytearray(len(text).to_bytes(8, "little") + text)
    read_or_refused(torch.frombuffer(whole, dtype=torch.uint8))


@pytest.mark.parametrize(
    "value",
    [
        {"$eval": "print('run')"},
        {"$Path": ["a"]},
        {"$Spot": {"name": "a"}},
        {"$Spot": {"name": "a", "at": [], "more": 1}},
        {"$Spot": [1]},
        {"$tensor": ["F32", [2], 8]},
        {"$tensor": ["F32", [0, -1], 0]},
        {"$tensor": ["F32", [0, 1 << 80], 0]},
        {"$tensor": ["F32", ["a"], 0]},
        {"$tensor": ["F32", [1], 0.5]},
        {"$tensor": ["object", [1], 0]},
        {"$dtype": "load"},
        {"$set": [[1]]},
        {"$path": 3},
        {"$path": "a\0b\ud800"},
    ],
)
def test_what_no_rank_writes_is_refused(value: Any) -> None:
    text = json.dumps(value).encode()
    whole = bytearray(len(text).to_bytes(8, "little") + text + bytes(8))
    read_or_refused(torch.frombuffer(whole, dtype=torch.uint8))


def test_a_deeply_nested_message_is_refused() -> None:
    text = b"[" * 100_000 + b"]" * 100_000
    whole = bytearray(len(text).to_bytes(8, "little") + text)
    with pytest.raises(RunFailed, match="cannot be read"):
        decode(torch.frombuffer(whole, dtype=torch.uint8))


def read_or_refused(message: torch.Tensor) -> None:
    try:
        decode(message, (Spot,))
    except RunFailed as refusal:
        assert "a message from another rank cannot be read" in str(refusal)
        assert "\n" not in str(refusal)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Spot("a", ()), "Spot"),
        ([{"a": object()}], "object"),
        (lambda: 0, "function"),
        (Pair(1, 2), "Pair"),
        (torch.ones(1).to_sparse(), "Tensor"),
    ],
)
def test_a_class_that_the_message_does_not_name_is_refused_by_its_sender(
    value: Any, name: str
) -> None:
    with pytest.raises(BadInput, match=name):
        encode(value)


def test_what_one_rank_cannot_send_is_an_error_on_all_and_keeps_none_waiting() -> None:
    refused = "BadInput: a message between ranks holds a Event, which is not sent"
    found = launch_workers(gather_what_cannot_be_sent, workers=2)
    assert [[text.partition(";")[0] for text in texts] for texts in found] == [
        [refused, refused, "[0, 1]"],
        [refused, refused, "[0, 1]"],
    ]
