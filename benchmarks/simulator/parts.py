"""The parts of the benchmark, each with its results and a table of them."""

from collections.abc import Callable

from playing import PLAYED, SCORED, Played, Scored, play_case, score_case


def playing() -> tuple[list[Played], list[str]]:
    """Actions a second."""
    found = [play_case(case) for case in PLAYED]
    head = f"{'million actions a second':<48}{'actions':>9}{'engine':>9}{'plain':>9}"
    rows = [
        f"{r.name:<48}{r.compute_actions:>9}{r.engine_actions_per_s / 1e6:>9.2f}"
        f"{r.plain_actions_per_s / 1e6:>9.3f}"
        for r in found
    ]
    return found, [head, *rows]


def scoring() -> tuple[list[Scored], list[str]]:
    """Milliseconds of a score."""
    score_case(SCORED[0])
    found = [score_case(case) for case in SCORED]
    heads = ("engine", "again", "moved", "fresh")
    head = f"{'milliseconds of a score':<48}" + "".join(f"{name:>9}" for name in heads)
    rows = [
        f"{r.name:<48}{r.engine_ms:>9.2f}{r.again_ms:>9.2f}{r.moved_ms:>9.2f}{r.fresh_ms:>9.2f}"
        for r in found
    ]
    return found, [head, *rows]


PARTS: dict[str, Callable[[], tuple[list, list[str]]]] = {
    "playing": playing,
    "scoring": scoring,
}
