"""Tests on a GPU: `pytest -m cuda` (see `gpu_device`)."""

import pytest
import torch
from gpu_device import DEVICE


@pytest.fixture(autouse=True)
def a_gpu_is_here() -> None:
    """A GPU is here, or the CPU is asked for."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
