"""Tests on a GPU: `pytest -m cuda`.

PENSTOCK_TEST_DEVICE=cpu runs their code on the CPU, which shows that the tests themselves hold.
"""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def a_gpu_is_here() -> None:
    """A GPU is here, or the CPU is asked for."""
    if os.environ.get("PENSTOCK_TEST_DEVICE", "cuda") == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
