"""Tables of the papers beside what the simulator gives, as Markdown.

    python benchmarks/simulator/published_tables.py [--only dapple|warm-up|bapipe]

The cases are those of tests/reproduction, which hold the same figures to their limits.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))


def row(*cells: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: object) -> list[str]:
    """The first two lines of a table."""
    return [row(*cells), "|" + "---|" * len(cells)]


def dapple() -> list[str]:
    """DAPPLE's runtime against GPipe."""
    from reproduction.dapple_runtime import (
        MEMORY_INPUTS,
        PUBLISHED,
        mean_peak_gib,
        play,
        samples_per_s,
    )

    names = ("system", "M", "samples/s published", "simulated", "memory published, GB", "simulated")
    lines = head(*names)
    for run in PUBLISHED:
        played = play(run.schedule, run.recompute, run.micro_batches)
        speed = samples_per_s(played, run.micro_batches)
        off = f" ({100 * (speed / run.samples_per_s - 1):+.1f} %)" if run.samples_per_s else ""
        peak = f"{mean_peak_gib(played):.1f}" + ("" if played.fits else ", out of memory")
        peak += " (input)" * (run in MEMORY_INPUTS)
        lines.append(
            row(
                run.system + " + recompute" * run.recompute,
                run.micro_batches,
                "-" if run.samples_per_s is None else f"{run.samples_per_s:.2f}",
                f"{speed:.2f}{off}" if played.fits else "-",
                "out of memory" if run.peak_gb is None else run.peak_gb,
                peak,
            )
        )
    return lines


def warm_up() -> list[str]:
    """What deeper warm-up gains, by communication."""
    from reproduction.warm_up_depth import ACRS, GAINS, own_links_gain, simulated_gain

    lines = head("stages", f"ACR {ACRS[0]:g}", *(f"{acr:g}" for acr in ACRS[1:]))
    lines += [row(n, *(f"{own_links_gain(n, acr):.2f}" for acr in ACRS)) for n in GAINS]
    wide = [acr for acr in ACRS if acr >= 1]
    lines += ["", "By the simulator, where it gives other figures:", ""]
    lines += head("stages", *(name for acr in wide for name in (f"ACR {acr:g}", "separate links")))
    for n in GAINS:
        gains = [
            simulated_gain(n, acr, separate_links=own) for acr in wide for own in (False, True)
        ]
        lines += [row(n, *(f"{gain:.2f}" for gain in gains))] * (n > 2)
    return lines


def bapipe() -> list[str]:
    """BaPipe's closed forms: M = 32, F = 1, B = 2, SR = 0.5."""
    from reproduction.bapipe_forms import METHODS, closed_form_s, played_s

    stages = (2, 4, 8)
    lines = head("schedule", *(name for n in stages for name in (f"N = {n}: form", "simulated")))
    cases = [(method, False) for method in METHODS]
    cases.insert(1 + METHODS.index("1f1b-sno"), ("1f1b-sno", True))
    for method, separate in cases:
        figures = [
            seconds
            for n in stages
            for seconds in (
                closed_form_s(method, n, 32, 3.0, 0.5),
                played_s(method, n, 32, 1.0, 2.0, 0.5, separate_links=separate),
            )
        ]
        name = f"`{method}`" + ", separate links" * separate
        lines.append(row(name, *(f"{seconds:g}" for seconds in figures)))
    return lines


TABLES = {"dapple": dapple, "warm-up": warm_up, "bapipe": bapipe}


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=TABLES)
    only = parser.parse_args().only
    for name in [only] if only else TABLES:
        print("\n".join([f"## {name}", "", *TABLES[name](), ""]))


if __name__ == "__main__":
    main()
