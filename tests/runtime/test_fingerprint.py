"""Batches that are unlike anywhere have different fingerprints, and equal ones have the same."""

import pytest
import torch

from penstock.runtime.metrics import FINGERPRINT_VALUES, fingerprint


def images(seed: int) -> torch.Tensor:
    """Digits with empty borders, as MNIST has them."""
    whole = torch.zeros(32, 1, 28, 28)
    whole[:, :, 10:26, 6:22] = torch.rand(
        32, 1, 16, 16, generator=torch.Generator().manual_seed(seed)
    )
    return whole


def padded_text(seed: int) -> torch.Tensor:
    """Tokens after padding on the left."""
    tokens = torch.randint(1, 999, (8, 64), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.zeros(8, 448, dtype=torch.int64), tokens], dim=1)


@pytest.mark.parametrize("make", [images, padded_text])
def test_batches_that_begin_alike_are_told_apart(make: object) -> None:
    found = [fingerprint(make(seed)) for seed in range(20)]  # type: ignore[operator]
    assert len(set(found)) == 20
    assert found[3] == fingerprint(make(3).clone())  # type: ignore[operator]


def test_samples_in_another_order_are_told_apart() -> None:
    batch = padded_text(1)
    assert fingerprint(batch) != fingerprint(batch.flip(0))
    small = torch.tensor([1.0, 2.0])
    assert fingerprint(small) != fingerprint(small.flip(0))


def test_each_value_of_a_small_leaf_counts() -> None:
    leaf = torch.zeros(FINGERPRINT_VALUES, dtype=torch.bool)
    found = set()
    for place in range(0, FINGERPRINT_VALUES, 37):
        changed = leaf.clone()
        changed[place] = True
        found.add(fingerprint(changed))
    assert len(found) == len(range(0, FINGERPRINT_VALUES, 37))
    assert 0.0 not in found


def test_layout_and_size_zero() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert fingerprint(whole.t()) == fingerprint(whole.t().contiguous())
    assert fingerprint(torch.zeros(0, 3)) == 0.0
