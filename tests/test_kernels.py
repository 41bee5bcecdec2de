import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType
from typing import NamedTuple, cast

import numpy as np
import pytest
from numba.core.errors import TypingError

import penstock
from penstock import kernels
from penstock.flat_record import borrowed
from penstock.kernels import KeptCode, cache_directory, compiled, fingerprint

SOURCE = Path(penstock.__file__).parent

KERNEL = """
from penstock_copy import small_helper as at
from penstock_copy.small_helper import weight

def total(values):
    found = 0.0
    for value in values:
        found += weight(value) + at.MORE
    return found
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of `penstock.kernels` in a package with a kernel and its helper in another file."""
    place = tmp_path / "penstock_copy"
    place.mkdir()
    shutil.copy(SOURCE / "kernels.py", place)
    (place / "__init__.py").write_text("")
    (place / "small_kernel.py").write_text(KERNEL)
    (place / "small_helper.py").write_text("MORE = 0.0\n\ndef weight(x):\n    return 2 * x\n")
    return place


def answer(package: Path, cache: Path, **more: str) -> tuple[float, list[str]]:
    """What a new process says, and the names of the kernels that it compiled."""
    program = (
        "import numpy as np\n"
        "from penstock_copy.kernels import compiled, when_compiling\n"
        "from penstock_copy.small_kernel import total\n"
        "names = []\n"
        "when_compiling(names.append)\n"
        "print(compiled(total)(np.arange(4.0)), *names)\n"
    )
    environment = {**os.environ, "PENSTOCK_CACHE_DIR": str(cache), **more}
    environment["PYTHONPATH"] = os.pathsep.join((str(package.parent), str(SOURCE.parent)))
    done = subprocess.run(
        [sys.executable, "-B", "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    number, *names = done.stdout.split()
    return float(number), names


def test_a_changed_helper_or_constant_changes_the_answer_at_once(package: Path) -> None:
    cache = package.parent / "cache"
    name = "penstock_copy.small_kernel.total"
    assert answer(package, cache) == (12.0, [name])
    assert answer(package, cache) == (12.0, [])
    helper = package / "small_helper.py"
    helper.write_text("MORE = 0.0\n\ndef weight(x):\n    return 3 * x\n")
    assert answer(package, cache) == (18.0, [name])
    helper.write_text("# a comment\nMORE = 0.0\n\n\ndef weight(x):\n    return 3 * x\n")
    assert answer(package, cache) == (18.0, [])
    helper.write_text("MORE = 1.0\n\ndef weight(x):\n    return 3 * x\n")
    assert answer(package, cache) == (22.0, [name])
    helper.write_text("MORE = 0.0\n\ndef weight(x):\n    return 2 * x\n")
    assert answer(package, cache) == (12.0, [])


def test_where_nothing_can_be_kept_every_process_compiles(package: Path) -> None:
    blocked = package.parent / "file"
    blocked.write_text("")
    assert answer(package, blocked)[1] == answer(package, blocked)[1] != []
    assert sorted(path.suffix for path in package.iterdir()) == [".py"] * 4


@pytest.mark.parametrize(
    "content",
    [b"\x80", b"cpenstock_copy.moved\nArrays\n.", b"cpenstock_copy.kernels\nArrays\n."],
    ids=["damaged", "of a module that is gone", "of a type that is gone"],
)
def test_a_file_that_cannot_be_read_is_compiled_again(package: Path, content: bytes) -> None:
    cache = package.parent / "cache"
    first = answer(package, cache)
    for path in cache.rglob("*.code"):
        path.write_bytes(content)
    assert answer(package, cache) == first
    assert answer(package, cache)[1] == []


def total_s(values: np.ndarray) -> float:
    seconds = 0.0
    for i in range(len(values)):
        seconds += doubled(values[i])
    return seconds


def doubled(x: float) -> float:
    return 2 * x


class Pair(NamedTuple):
    first: np.ndarray
    second: np.ndarray


class SwappedPair(NamedTuple):
    second: np.ndarray
    first: np.ndarray


def signs(values: np.ndarray) -> int:
    return stepped(0, len(values)) + stepped(1, len(values)) + stepped(-1, len(values))


def stepped(first: int, step: int) -> int:
    return first + step


def test_what_a_kernel_calls_is_compiled_once_and_has_no_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    assert compiled(signs)(np.zeros(5)) == 15
    (part,) = kernels.helper(cast("FunctionType", stepped)).overloads.values()
    assert part.library.get_pointer_to_function(part.fndesc.llvm_func_name) == 0


def test_a_numba_that_is_newer_than_known_compiles_helpers_in_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "NEWEST_WITH_PARTS", (0, 0))
    monkeypatch.setattr(kernels, "helpers", {})
    assert kernels.made(cast("FunctionType", total_s))(np.arange(5.0)) == 20.0
    (helper,) = kernels.helpers.values()
    (own,) = helper.overloads.values()
    assert own.library.get_pointer_to_function(own.fndesc.llvm_func_name) > 0


def first_of(pair: Pair | SwappedPair) -> float:
    return pair.first[0]


def test_named_tuples_are_told_apart_by_the_names_of_their_fields() -> None:
    SwappedPair.__name__ = SwappedPair.__qualname__ = "Pair"
    one, two = np.array([1.0]), np.array([2.0])
    kept = [KeptCode(first_of), KeptCode(first_of)]
    assert kept[0].directory == kept[1].directory
    assert compiled(first_of)(Pair(one, two)) == compiled(first_of)(SwappedPair(two, one)) == 1.0


def written_through(pair: Pair) -> float:
    lent = borrowed(pair)
    swap_first(lent)
    return lent.first[0] - lent.second[0]


def swap_first(pair: Pair) -> None:
    pair.first[0], pair.second[0] = pair.second[0], pair.first[0]


def test_a_borrowed_named_tuple_is_read_and_written_where_it_is() -> None:
    pair = Pair(np.array([1.0, 5.0]), np.array([4.0]))
    assert compiled(written_through)(pair) == 3.0
    assert pair.first.tolist() == [4.0, 5.0]
    assert pair.second.tolist() == [1.0]


def test_an_array_with_gaps_is_not_borrowed() -> None:
    """Its address alone does not say where its values are."""
    every_second = np.array([1.0, 9.0, 5.0])[::2]
    with pytest.raises(TypingError, match="only an array without gaps"):
        compiled(written_through)(Pair(every_second, np.array([4.0])))


def test_a_kernel_is_the_plain_function_and_leaves_it_as_it_is() -> None:
    values = np.arange(5.0)
    assert compiled(total_s)(values) == total_s(values) == 20.0
    assert compiled(total_s) is compiled(total_s)
    assert doubled is total_s.__globals__["doubled"]
    assert fingerprint(total_s) != fingerprint(doubled)


def test_a_function_that_moves_to_another_module_has_another_key():
    """Code that was kept for it names the old module, which may be gone."""
    before = fingerprint(total_s)
    module = total_s.__module__
    total_s.__module__ = "penstock.elsewhere"
    try:
        assert fingerprint(total_s) != before
    finally:
        total_s.__module__ = module


def test_old_versions_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    kept = KeptCode(total_s)
    for number in range(6):
        old = kept.directory.parent / f"old-{number}"
        old.mkdir(parents=True)
        os.utime(old, (number, number))
    kept.directory.mkdir()
    kept.forget_old_keys()
    assert len(list(kept.directory.parent.iterdir())) == kernels.KEYS_KEPT
    assert kept.directory.exists() and (kept.directory.parent / "old-5").exists()
    assert cache_directory() == tmp_path / "kernels"


def test_several_processes_may_compile_at_once(package: Path) -> None:
    cache = package.parent / "cache"
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: answer(package, cache)[0], range(3)))
    assert found == [12.0] * 3
    assert len(list(cache.rglob("*.code"))) == 1
