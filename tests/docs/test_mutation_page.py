"""Mistakes made on purpose: what the script makes of a source, and the page of its results."""

import ast
import doctest
import random
from pathlib import Path

import pytest
from scripts import script_at

ROOT = Path(__file__).parent.parent.parent
SCRIPT = script_at("benchmarks/mutation.py", "mutation")


def test_the_page_has_the_tables_of_the_recorded_run() -> None:
    page = (ROOT / "docs" / "benchmarks" / "tests.md").read_text(encoding="utf-8")
    verdicts = SCRIPT.read_verdicts(SCRIPT.RESULTS)
    assert SCRIPT.tables(verdicts) in page
    ran = [each for each in verdicts if each.outcome != "invalid"]
    caught = sum(each.outcome == "killed" for each in ran)
    assert f"**{caught} of {len(ran)} are caught**, in {sum(v.cpu_s for v in ran):.0f}" in page


def test_each_mistake_that_all_tests_pass_was_looked_at() -> None:
    left = {SCRIPT.key(one) for one in SCRIPT.judged("left")}
    for each in SCRIPT.read_verdicts(SCRIPT.RESULTS):
        if each.outcome in ("survived", "doubtful"):
            assert SCRIPT.key(vars(each.mutant)) in left, each.mutant


def test_the_examples_of_the_script_are_right() -> None:
    assert doctest.testmod(SCRIPT).failed == 0


def test_a_mistake_in_python_is_another_program_and_not_another_docstring() -> None:
    path = ROOT / "src" / "penstock" / "simulate" / "memory.py"
    text = path.read_text(encoding="utf-8")
    every = SCRIPT.mutants_of(path)
    for mutant in random.Random(1).sample(every, 40):
        assert ast.dump(ast.parse(SCRIPT.with_mistake(text, mutant))) != ast.dump(ast.parse(text))
    assert not any(mutant.before.startswith(('"', "'")) for mutant in every)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("  if (a < b && !(c == 0))", [" < ", " && ", " == ", "0"]),
        ("  std::vector<double> held(2);", ["2"]),
        ("  // a + b", []),
        ('  throw std::runtime_error("a + 1");', []),
        ('  m.def("a + 1", &one);', ['m.def("a + 1", &one);']),
        ("  double seconds = 0.5;", ["0.5"]),
        ("  ++count;", ["++count;"]),
    ],
)
def test_mistakes_in_the_core_are_made_where_code_is(line: str, wanted: list[str]) -> None:
    found = SCRIPT.mistakes_in_cpp(f"{{\n{line}\n")
    assert sorted(before for _, _, before, _ in found) == sorted(wanted)
    assert all(line[column:].startswith(before) for _, column, before, _ in found)


def test_a_mistake_is_found_again_below_new_lines() -> None:
    mutant = SCRIPT.Mutant("a.py", 2, 4, "1", "2", "a = 1")
    assert SCRIPT.with_mistake("b = 1\n\n\na = 1\n", mutant) == "b = 1\n\n\na = 2\n"
    with pytest.raises(ValueError, match="no longer has the line"):
        SCRIPT.with_mistake("b = 1\n", mutant)
