"""The page on Hugging Face's trainer: it has each option, and what is refused."""

import dataclasses
import re

import pytest
from docs.test_pages import DOCS

PAGE = (DOCS / "guides" / "hugging-face.md").read_text(encoding="utf-8")


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
