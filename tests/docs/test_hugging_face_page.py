"""The page on Hugging Face's trainer: its change is that of the scripts, and it has each option."""

import dataclasses
import re
from pathlib import Path

import pytest
from docs.test_pages import is_part_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "hugging-face.md").read_text(encoding="utf-8")


def test_the_lines_of_the_change_are_those_of_the_scripts() -> None:
    diff, _ = re.findall(r"^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for file, mark in (("loop_hugging_face_before.py", "-"), ("loop_hugging_face.py", "+")):
        script = (ROOT / "examples" / file).read_text(encoding="utf-8")
        lines = [line[1:] for line in diff.splitlines() if line[0] in (" ", mark)]
        assert is_part_of("\n".join(lines), script), file


def test_each_argument_of_the_trainer_is_in_a_table() -> None:
    transformers = pytest.importorskip("transformers")
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    told = set(re.findall(r"`(\w+)`", PAGE.partition("## Each argument")[2]))
    assert names - told == set()


def test_what_the_page_says_is_refused_is_refused() -> None:
    pytest.importorskip("transformers")
    from penstock.integrations.loops.hugging_face import REFUSED

    refused = PAGE.partition("Refused by name")[2].partition("Does not matter")[0]
    told = set(re.findall(r"`(\w+)`", refused))
    assert set(REFUSED) - told == set()
