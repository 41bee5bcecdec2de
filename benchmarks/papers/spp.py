"""SPP's headline figure (arXiv 2204.10562): its gain over other planners on uneven links."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from claim import Claim

sys.path.append(str(Path(__file__).parents[1] / "planning"))

from uneven_links import BATCHES, BEST, PUBLISHED_GAIN, gains

__all__ = ["spp_claims"]

PAPER = "SPP"
SPREADS = (1, 10, 100)


def spp_claims(quick: bool) -> Iterator[Claim]:
    """The largest gain over each baseline; with ``quick`` one model and one spread."""
    models, spreads, seeds = (("vgg-19",), (100,), 1) if quick else (BATCHES, SPREADS, 3)
    largest: dict[str, float] = defaultdict(lambda: -1.0)
    for model in models:
        for spread in spreads:
            for seed in range(seeds):
                for name, gain in gains(model, 8, spread, seed).items():
                    largest[name] = max(largest[name], gain)
    best = largest.pop(BEST)
    yield Claim(
        PAPER,
        "faster than the best of the other planners, at most by",
        "8 devices, links up to 100 times apart; BERT-48, GNMT-16, VGG-19",
        100 * PUBLISHED_GAIN,
        100 * best,
        unit="%",
        varied={f"over {name}": 100 * gain for name, gain in largest.items()},
        at_least=True,
    )
