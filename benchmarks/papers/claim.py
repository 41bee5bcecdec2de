"""A figure of a paper beside ours, and what we say of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["WITHIN", "Claim", "claims_table"]

WITHIN = 0.05
"""A figure is reproduced if it is off by at most this share."""

MANY = 5
"""Of more figures with other inputs a table has the least and the largest."""


@dataclass(frozen=True)
class Claim:
    """A published figure, ours in the setting as far as it is known, and ours with other inputs.

    A claim has one model (or one set of models) and one baseline; ``varied`` names each changed
    input. ``published`` is None where we know of no published figure. ``rehearsed`` is the figure
    of real processes on emulated devices and links. Where the paper prints ``decimals`` places of a
    small figure, ours is rounded to them before it is compared.
    """

    paper: str
    what: str
    setting: str
    published: float | None
    simulated: float
    unit: str = "x"
    varied: Mapping[str, float] = field(default_factory=dict[str, float])
    rehearsed: float | None = None
    decimals: int = 9

    @property
    def verdict(self) -> str:
        """In one word.

        - "reproduced": the figure in the setting is the published one;
        - "explained": the published figure lies between ours with other inputs;
        - "larger", "smaller": ours is so with all inputs;
        - "-": there is no published figure.

        >>> Claim("p", "w", "s", 2.0, 2.05).verdict
        'reproduced'
        >>> Claim("p", "w", "s", 2.0, 3.0, varied={"slow links": 1.5}).verdict
        'explained'
        >>> Claim("p", "w", "s", 2.0, 3.0, varied={"slow links": 2.5}).verdict
        'larger'
        >>> Claim("p", "w", "s", 0.03, 0.0333, decimals=2).verdict
        'reproduced'
        """
        if self.published is None:
            return "-"
        if abs(round(self.simulated, self.decimals) - self.published) <= WITHIN * self.published:
            return "reproduced"
        found = (self.simulated, *self.varied.values())
        if min(found) <= self.published <= max(found):
            return "explained"
        return "larger" if self.simulated > self.published else "smaller"

    def to_json(self) -> dict[str, Any]:
        """All fields and the verdict."""
        return {**asdict(self), "varied": dict(self.varied), "verdict": self.verdict}


def claims_table(claims: list[dict[str, Any]]) -> str:
    """A row for each claim, as Markdown."""
    rows = [
        "| claim | setting | published | simulated | with other inputs | rehearsed | verdict |",
        "|---|---|--:|--:|---|--:|---|",
    ]
    for claim in claims:
        unit = claim["unit"]
        varied = varied_text(claim["varied"], unit)
        rehearsed = "-" if claim["rehearsed"] is None else shown(claim["rehearsed"], unit)
        published = "-" if claim["published"] is None else shown(claim["published"], unit)
        figures = f"{published} | {shown(claim['simulated'], unit)}"
        rows.append(
            f"| {claim['what']} | {claim['setting']} | {figures} | {varied or '-'} | {rehearsed} "
            f"| {claim['verdict']} |"
        )
    return "\n".join(rows)


def varied_text(varied: Mapping[str, float], unit: str) -> str:
    """The figures with other inputs; of many the least and the largest.

    >>> varied_text({"slow links": 1.5, "fast links": 2.5}, "x")
    'slow links: 1.50x; fast links: 2.50x'
    """
    named = sorted(varied, key=lambda name: varied[name])
    names = list(varied) if len(named) <= MANY else [named[0], named[-1]]
    return "; ".join(f"{name}: {shown(varied[name], unit)}" for name in names)


def shown(value: float, unit: str) -> str:
    """A figure with its unit: ``x``, ``%`` or a count.

    >>> shown(1.714, "x"), shown(12.37, "%"), shown(9, "of 18")
    ('1.71x', '12.4 %', '9 of 18')
    """
    if unit == "x":
        return f"{value:.2f}x"
    return f"{value:,.1f} {unit}" if unit == "%" else f"{value:.3g} {unit}".rstrip()
