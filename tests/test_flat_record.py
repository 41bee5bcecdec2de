"""Lists in one array, read by name in compiled code."""

from types import FunctionType

import numpy as np
import numpy.typing as npt
import pytest
from numba.core.errors import TypingError

from penstock.flat_record import reader
from penstock.kernels import compiled, fingerprint

PARTS = (
    ("count", 0, True, False),
    ("now_s", 1, False, False),
    ("turns", 2, True, True),
    ("ends_s", 3, False, True),
)
in_record = reader("record", PARTS)
in_other = reader("record", (*PARTS[:2], ("turns", 3, True, True), ("ends_s", 2, False, True)))


def advance(array: npt.NDArray[np.int64]) -> float:
    """Writes to every kind of part, and reads what it wrote."""
    record = in_record(array)
    record.count += 2
    record.now_s = 0.5
    record.turns[1] = record.count
    record.ends_s[0] = record.now_s + record.turns[1]
    return record.ends_s[0]


def advance_other(array: npt.NDArray[np.int64]) -> float:
    """The same where lists stand elsewhere."""
    record = in_other(array)
    return record.ends_s[0]


def test_parts_are_where_their_places_say() -> None:
    array = np.array([5, 0, 4, 6, 0, 0, 0], dtype=np.int64)
    assert compiled(advance)(array) == 7.5
    real = array.view(np.float64)
    assert (array[0], real[1], list(array[4:6]), real[6]) == (7, 0.5, [0, 7], 7.5)


def test_machine_code_is_not_taken_for_that_of_other_places() -> None:
    """The places are a part of the key under which machine code is kept."""
    assert key(in_record) != key(in_other)
    assert key(in_record) == key(reader("record", PARTS))


def key(record: object) -> str:
    """The fingerprint of `advance` as a kernel of the package, whose own names it describes."""
    names = {**advance.__globals__, "in_record": record}
    kernel = FunctionType(advance.__code__, names, "advance")
    kernel.__module__ = "penstock.of_a_test"
    return fingerprint(kernel)


def test_a_list_may_begin_anywhere() -> None:
    array = np.array([0, 0, 5, 4, 0, 0], dtype=np.int64)
    array.view(np.float64)[5] = 2.25
    assert compiled(advance_other)(array) == 2.25


def test_a_record_does_not_lie_in_an_array_with_gaps() -> None:
    with pytest.raises(TypingError, match="only an array without gaps"):
        compiled(advance)(np.zeros(14, dtype=np.int64)[::2])
