"""A figure of a paper beside ours, and what we say of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

WITHIN = 0.05
"""A figure is reproduced if it is off by at most this share."""

MANY = 5
"""Of more figures with other inputs a table has the least and the largest."""


def verdict_of(
    published: float | None,
    ours: float,
    others: Mapping[str, float],
    *,
    assumed: str = "",
    by_construction: bool = False,
) -> str:
    """The verdict of figures on a claim. ``others`` are ours with one other input each, by name.

    - "-": there is no published figure.
    - "by construction": ours follows from a definition, or from inputs that were set by it.
    - "reproduced": ours is within `WITHIN` of it, on the claim's own model and baseline.
    - "with X": ours is so with the one input X that is not the claim's own.
    - "not decided": it is not, and X, which the paper does not give, was ``assumed``.
    - "not reproduced": it is not, whether smaller or larger.

    >>> verdict_of(2.0, 2.09, {}), verdict_of(2.0, 2.11, {"fast links": 1.0})
    ('reproduced', 'not reproduced')
    >>> verdict_of(2.0, 3.0, {"slow links": 2.01, "fast links": 4.0})
    'with slow links'
    >>> verdict_of(2.0, 2.0, {}, assumed="64 rows"), verdict_of(2.0, 3.0, {}, assumed="64 rows")
    ('with 64 rows', 'not decided')
    """
    if published is None:
        return "-"
    if by_construction:
        return "by construction"

    def off(figure: float) -> float:
        return abs(figure - published)

    limit = WITHIN * published
    if off(ours) <= limit:
        return f"with {assumed}" if assumed else "reproduced"
    nearest = min(others, key=lambda name: off(others[name]), default="")
    if nearest and off(others[nearest]) <= limit:
        return f"with {nearest}"
    return "not decided" if assumed else "not reproduced"


@dataclass(frozen=True)
class Claim:
    """A published figure, ours in the setting as far as it is known, and ours with other inputs.

    A claim has one model (or one set of models) and one baseline; each of ``varied`` has one other
    input, which it names. ``published`` is None where we know of no published figure. Where the
    paper prints ``decimals`` places of a small figure, ours is rounded to them before it is
    compared. For ``assumed`` and ``by_construction`` see `verdict_of`.
    """

    paper: str
    what: str
    setting: str
    published: float | None
    simulated: float
    unit: str = "x"
    varied: Mapping[str, float] = field(default_factory=dict[str, float])
    assumed: str = ""
    by_construction: bool = False
    decimals: int = 9

    @property
    def verdict(self) -> str:
        """The verdict of the figures; see `verdict_of`.

        >>> Claim("p", "w", "s", 0.03, 0.0333, decimals=2).verdict
        'reproduced'
        """
        return verdict_of(
            self.published,
            round(self.simulated, self.decimals),
            self.varied,
            assumed=self.assumed,
            by_construction=self.by_construction,
        )

    def to_json(self) -> dict[str, Any]:
        """All fields and the verdict."""
        return {**asdict(self), "varied": dict(self.varied), "verdict": self.verdict}


def claims_table(claims: list[dict[str, Any]]) -> str:
    """A row for each claim, as Markdown."""
    rows = [
        "| claim | setting | published | simulated | with other inputs | verdict |",
        "|---|---|--:|--:|---|---|",
    ]
    for claim in claims:
        unit = claim["unit"]
        varied = varied_text(claim["varied"], unit)
        published = "-" if claim["published"] is None else shown(claim["published"], unit)
        figures = f"{published} | {shown(claim['simulated'], unit)}"
        rows.append(
            f"| {claim['what']} | {claim['setting']} | {figures} | {varied or '-'} "
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
