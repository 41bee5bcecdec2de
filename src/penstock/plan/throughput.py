"""Rates at which a plan trains, and their price."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from penstock.cluster.cluster import Cluster
from penstock.files import Json
from penstock.profile.model_profile import ModelProfile
from penstock.text import percent_text, three_digits

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates of a plan; 0 for what its profile or its cluster does not say.

    ``mfu`` is model FLOPs utilisation: the FLOPs of forwards and backwards, without recompute, as a
    share of what the devices of the plan could do at their peak (Chowdhery et al., PaLM, 2022,
    appendix B). ``price_per_hour`` is that of the whole cluster, in the currency of its file.
    """

    samples_per_s: float
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    price_per_hour: float = 0.0

    def hours(self, samples: float) -> float:
        """Hours that ``samples`` samples take."""
        return samples / self.samples_per_s / HOUR_S if self.samples_per_s else inf

    @property
    def price_per_million(self) -> float:
        """The price of a million tokens, or of a million samples where tokens are not known."""
        return 1e6 / (self.tokens_per_s or self.samples_per_s) / HOUR_S * self.price_per_hour

    def __str__(self) -> str:
        return ", ".join([f"{rate_words(self.samples_per_s)} samples/s", *self.more_words])

    @property
    def more_words(self) -> list[str]:
        """Known rates besides the samples per second, in words."""
        parts: list[str] = []
        if self.tokens_per_s:
            parts.append(f"{rate_words(self.tokens_per_s)} tokens/s")
        if self.mfu:
            parts.append(f"MFU {percent_text(self.mfu)}")
        if self.price_per_hour:
            thing = "tokens" if self.tokens_per_s else "samples"
            parts.append(f"{self.price_per_million:.3g} for a million {thing}")
        return parts

    def to_json(self) -> dict[str, Json]:
        """The keys that the command line documents; null for what is not known."""
        return {
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s or None,
            "mfu": self.mfu or None,
            "price_per_hour": self.price_per_hour or None,
        }


NOT_KNOWN = Throughput(0.0)
"""Nothing is known."""


def throughput_of(
    profile: ModelProfile,
    cluster: Cluster,
    devices: Iterable[int],
    samples: int,
    iteration_s: float,
) -> Throughput:
    """The rates of iterations of ``samples`` samples on the ``devices`` of a plan."""
    samples_per_s = samples / iteration_s if 0 < iteration_s < inf else 0.0
    peaks = [cluster.devices[device].peak_flops_per_s for device in devices]
    return Throughput(
        samples_per_s,
        samples_per_s * profile.tokens_per_sample,
        samples_per_s * profile.flops_per_sample / sum(peaks) if peaks and all(peaks) else 0.0,
        cluster.price_per_hour,
    )


def rate_words(rate: float) -> str:
    """A rate in thousands, millions or billions.

    >>> rate_words(172.3), rate_words(2_120_000)
    ('172', '2.12 M')
    """
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= scale:
            return f"{three_digits(rate / scale)} {unit}"
    return three_digits(rate)
