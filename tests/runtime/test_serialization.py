"""Values come back equal, hold named classes only, and no bytes can do more than be refused."""

import io
import pickle
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime.processes.workers_under_test import gather_what_cannot_be_sent

from penstock.errors import BadInput
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.serialization import from_bytes, to_bytes


@dataclass(frozen=True, slots=True)
class Spot:
    name: str
    at: tuple[int, ...]
    inner: Any = None


class Pair(NamedTuple):
    left: int
    right: int


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


TENSORS = st.builds(
    lambda shape, dtype: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
LEAVES = SCALARS | st.binary() | TENSORS | st.sets(st.integers()) | st.sampled_from([torch.float16])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.tuples(st.integers(), st.text()), inner)
        | st.builds(Spot, st.text(), st.lists(st.integers()).map(tuple), inner)
    ),
    max_leaves=8,
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


def through(value: Any) -> Any:
    return from_bytes(bytes(to_bytes(value, "it")), "it", (Spot,))


@given(VALUES)
def test_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    found = through(value)
    assert plain(found) == plain(value)
    assert type(found) is type(value)


def test_numbers_that_json_lacks() -> None:
    assert [through(inf), through(-inf), through(2**70)] == [inf, -inf, 2**70]
    assert through(nan) != through(nan)


@given(VALUES, st.data())
def test_changed_bytes_are_read_or_refused_in_one_line(value: Any, data: st.DataObject) -> None:
    changed = bytearray(to_bytes(value, "it"))
    for _ in range(data.draw(st.integers(1, 8))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    read_or_refused(bytes(changed[: data.draw(st.integers(0, len(changed)))]))


@given(st.binary())
def test_any_bytes_are_read_or_refused_in_one_line(data: bytes) -> None:
    for begin in (b"", b"PK"):
        read_or_refused(begin + data)


def test_deep_nesting_is_refused() -> None:
    read_or_refused(b"[" * 100_000)


def read_or_refused(data: bytes) -> None:
    try:
        from_bytes(data, "it", (Spot,))
    except BadInput as refusal:
        assert str(refusal).startswith("it ")
        assert "\n" not in str(refusal)


def test_a_strangers_code_is_not_run(tmp_path: Path) -> None:
    trace, archive = tmp_path / "executed", io.BytesIO()
    payload = Payload(trace)
    torch.save([payload], archive)
    for data in (archive.getvalue(), pickle.dumps(payload)):
        with pytest.raises(BadInput):
            from_bytes(data, "it", (Spot,))
    assert not trace.exists()
    torch.load(io.BytesIO(archive.getvalue()), weights_only=False)
    assert trace.exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [([Spot("a", ())], "Spot"), ([{"a": object()}], "object"), (Pair(1, 2), "Pair")],
)
def test_a_class_that_the_reader_does_not_name_is_refused(value: Any, name: str) -> None:
    with pytest.raises(BadInput, match=rf"it holds a .*{name}, which is not kept"):
        from_bytes(bytes(to_bytes(value, "it")), "it")


def test_what_one_rank_cannot_send_is_an_error_on_all_and_keeps_none_waiting() -> None:
    for texts in launch_workers(gather_what_cannot_be_sent, workers=2):
        *refused, sent = texts
        assert len(refused) == 2
        for text in refused:
            assert text.startswith("BadInput: a message between ranks cannot be written (")
        assert sent == "[0, 1]"
