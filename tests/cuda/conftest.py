"""Tests on a GPU: `pytest -m cuda`. Elsewhere they run on the CPU if a variable names it.

PENSTOCK_TEST_DEVICE=cpu runs their code on the CPU, which shows that the tests themselves hold.
"""

import os

import pytest
import torch

os.environ.setdefault("PENSTOCK_TEST_DEVICE", "cuda")


@pytest.fixture(autouse=True)
def double_precision_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is there; products in float32 are not rounded to TF32, as torch's default is."""
    if os.environ["PENSTOCK_TEST_DEVICE"] == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
