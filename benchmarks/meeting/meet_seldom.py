"""Pipelines that meet seldom against synchronous plans, on two hosts joined by a slow link.

    python benchmarks/meeting/meet_seldom.py --out benchmarks/meeting/results.json

The hosts are network namespaces, as in `benchmarks/rehearsal/two_hosts.py`: each has two ranks on
one core. In turns of some steps each, with equal batches, a small GPT on text is trained by the
plan that `search` finds, by two pipelines that sum gradients in every step, and by the same two
when they meet seldom. Each is asked how long it takes to the loss on held-out text that the plan of
`search` has after two thirds of its steps. It needs root on Linux.
"""

import argparse
import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BESIDE = [HERE.parent / name for name in ("prediction", "rehearsal", "reliability")]
sys.path += map(str, BESIDE)

from chaos import machine  # noqa: E402
from other_load import other_load  # noqa: E402
from torchrun_on_hosts import run_on_hosts, two_hosts  # noqa: E402

from penstock.cluster.toml_file import write_cluster  # noqa: E402
from penstock.document import write_text  # noqa: E402

LIMIT_S = 1_800.0


def train(folder: Path, megabits: float, turns: int, turn: int, every: int) -> dict[str, Any]:
    """Train all contenders on both hosts; what rank 0 found."""
    cluster = two_hosts(megabits * 1e6 / 8, f"two hosts at {megabits:g} Mb/s")
    write_cluster(cluster, folder / "hosts.toml")
    given = [str(folder), *map(str, (turns, turn, every))]
    run_on_hosts(cluster, HERE / "meet_seldom_rank.py", given, LIMIT_S)
    return json.loads((folder / "found.json").read_text())


def main() -> None:
    """Train and write what was found."""
    parser = argparse.ArgumentParser(description="Pipelines that meet seldom, on two hosts.")
    parser.add_argument("--megabits", type=float, default=100.0, help="a second, of the link")
    parser.add_argument("--turns", type=int, default=15, help="turns of each contender")
    parser.add_argument("--turn", type=int, default=20, help="steps of a turn")
    parser.add_argument("--every", type=int, default=20, help="steps between meetings")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-meeting-") as made, other_load() as others:
        found = train(Path(made), chosen.megabits, chosen.turns, chosen.turn, chosen.every)
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "machine": machine(),
        "cores": len(os.sched_getaffinity(0)),
        "megabits_per_s": chosen.megabits,
        "meet_every": chosen.every,
        "steps": chosen.turns * chosen.turn,
        **found,
        "other_cores": others.cores,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if chosen.out:
        write_text(chosen.out, text + "\n")


if __name__ == "__main__":
    main()
