"""Architectures of transformers in stages on a stand-in GPU, forward and backward, as on CPUs.

No operator gets tensors of two devices, and loss and gradients are those of the plain module.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from capture.stand_in_census_cases import judged
from capture.test_census import RECORDED, SAMPLE

from penstock.runtime.processes.launch import launch_workers

ALWAYS = (
    *("MixtralForCausalLM", "GPTNeoForCausalLM"),
    *("T5ForConditionalGeneration", "ConvNextForImageClassification"),
)
"""One of each kind, one whose experts are counted, one that makes a tensor of a number."""


def not_right(names: Iterable[str]) -> dict[str, Any]:
    named = [(name, RECORDED[name]["head"]) for name in names]
    (rows,) = launch_workers(judged, (named,), workers=1, threads=1)
    assert list(rows) == [name for name, _ in named]
    return {name: row for name, row in rows.items() if not row["outcome"].startswith("right")}


def test_one_of_each_kind() -> None:
    assert not not_right(ALWAYS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_sample() -> None:
    assert len(SAMPLE) > 40 and not not_right(SAMPLE)
