"""A plan on two hosts: predicted, rehearsed and trained, three timelines in one page.

    python benchmarks/rehearsal/two_hosts.py --out benchmarks/rehearsal/two_hosts.json --page p.html

The hosts are network namespaces, joined at 1 Gb/s by the kernel. Each has two ranks of a GPT-like
model on one core, started by a torchrun of its own. They measure, plan and train, in turns with
torch.distributed.pipelining under each of its schedules. The plan is then rehearsed over the same
kind of network. It needs root on Linux.
"""

import argparse
import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "prediction"), str(HERE.parent / "reliability")]

from chaos import machine  # noqa: E402
from other_load import other_load  # noqa: E402
from over_namespaces import rehearse_over_namespaces  # noqa: E402
from torchrun_on_hosts import run_on_hosts, two_hosts  # noqa: E402

from penstock.cluster.toml_file import read_cluster, write_cluster  # noqa: E402
from penstock.files import write_text  # noqa: E402
from penstock.plan.json_file import read_plan  # noqa: E402
from penstock.profile.json_file import read_profile  # noqa: E402
from penstock.rehearse.emulation import Emulation  # noqa: E402
from penstock.rehearse.rehearsal import Rehearsal, differences  # noqa: E402
from penstock.report.timelines_html import TimelinePanel, timelines_page  # noqa: E402
from penstock.text import seconds_text  # noqa: E402
from penstock.timeline.device_rows import gantt_rows  # noqa: E402
from penstock.timeline.json_file import read_timeline  # noqa: E402

GIGABIT = 125e6
LIMIT_S = 900.0


def train(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure, plan and train on both hosts; the rest of what they find is left in ``folder``."""
    cluster = two_hosts(GIGABIT, "two hosts at 1 Gb/s")
    write_cluster(cluster, folder / "hosts.toml")
    given = [str(folder / "hosts.toml"), str(folder), str(rounds)]
    run_on_hosts(cluster, HERE / "two_hosts_rank.py", given, LIMIT_S)
    return json.loads((folder / "trained_times.json").read_text())


def rehearsed(folder: Path, iterations: int) -> Rehearsal:
    """The trained plan, carried out with the profile that it was made for, over the same links."""
    plan, profile = read_plan(folder / "plan.json"), read_profile(folder / "profile.json")
    cluster = read_cluster(folder / "cluster.toml")
    return rehearse_over_namespaces(Emulation(plan, profile, cluster, 1.0, 1.0, iterations))


def page(folder: Path, found: Rehearsal, trained_s: float) -> str:
    """The three timelines, one above the other."""
    panels = [
        TimelinePanel(gantt_rows(timeline, ()), f"{title}: {seconds_text(seconds)}", note)
        for title, seconds, note, timeline in (
            ("Predicted", found.simulated_s, "by the simulator", found.prediction.timeline),
            ("Rehearsed", found.rehearsed_s, "waiting, over the kernel's link", found.timeline),
            ("Trained", trained_s, "the last iteration", read_timeline(folder / "trained.json")),
        )
    ]
    return timelines_page(
        panels, "Two hosts at 1 Gb/s", f"{found.emulation.plan.schedule}, 4 ranks"
    )


def main() -> None:
    """Train, rehearse and compare; write the results and the page."""
    parser = argparse.ArgumentParser(description="Predicted, rehearsed and trained on two hosts.")
    parser.add_argument("--rounds", type=int, default=12, help="iterations of each contender")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--page", type=Path, help="HTML page to write")
    parser.add_argument("--folder", type=Path, help="keep plan, profile, cluster and timeline here")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-two-hosts-") as made:
        folder = chosen.folder or Path(made)
        folder.mkdir(exist_ok=True)
        with other_load() as others:
            trained = train(folder, chosen.rounds)
            rehearsal = rehearsed(folder, 6)
        seconds = {name: median(values) for name, values in trained["seconds"].items()}
        if chosen.page:
            write_text(chosen.page, page(folder, rehearsal, seconds["ours"]))
        plan = rehearsal.emulation.plan
        best = min((name for name in seconds if name != "ours"), key=seconds.__getitem__)
        pairs = zip(trained["seconds"]["ours"], trained["seconds"][best], strict=True)
        result = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            "machine": machine(),
            "cores": len(os.sched_getaffinity(0)),
            "rounds": chosen.rounds,
            "schedule": plan.schedule,
            "stages": [[s.layers.start, s.layers.stop, *s.devices] for s in plan.stages],
            "predicted_s": rehearsal.simulated_s,
            "rehearsed_s": rehearsal.rehearsed_s,
            "differences": differences(rehearsal),
            "mean_late_s": rehearsal.mean_late_s,
            "trained_s": seconds["ours"],
            "spread_s": [min(trained["seconds"]["ours"]), max(trained["seconds"]["ours"])],
            "rivals_s": {name: s for name, s in seconds.items() if name != "ours"},
            "best_rival": best,
            "faster": median(theirs / ours for ours, theirs in pairs),
            "losses": trained["losses"],
            "links": trained["links"],
            "other_cores": others.cores,
        }
    text = json.dumps(result, indent=1)
    print(text)
    if chosen.out:
        write_text(chosen.out, text + "\n")


if __name__ == "__main__":
    main()
