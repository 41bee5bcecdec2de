"""Architectures that can be trained in stages, judged against the plain module.

    python benchmarks/models.py [--heads causal,vision] [--only NAME ...] [--sample N] [--again]
    python benchmarks/models.py --families    # one model of each family of torchvision and timm
    python benchmarks/models.py --device cuda --jobs 16 --out FILE    # model and batch on a GPU
    python benchmarks/models.py --page        # renew the table of docs/benchmarks/models.md

Every architecture that the installed transformers registers for the heads is built as a tiny
version with random weights, run eagerly, captured, cut into three stages and trained for one step
of two micro-batches in one process (`transport="in-process"`); the loss and every gradient are
compared with those of the user's own module on the whole batch. Each is judged in a process of its
own, with limits on CPU seconds and memory. Rows are written to the JSON as they come; what is there
is not judged again except with `--again` or `--only`.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from time import perf_counter, strftime
from typing import Any

HERE = Path(__file__).parent / "models"
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
import transformers  # noqa: E402
from judging import judge, judge_family, outcome_of  # noqa: E402
from registered import HEADS, registered  # noqa: E402

GOOD = ("right", "right as gradient accumulation")
OUTCOMES = (*GOOD, "refused", "WRONG", "crash", "timeout", "out of memory", "does not run eagerly")
KINDS = {
    "causal": "causal language models",
    "masked": "masked language models",
    "seq2seq": "sequence to sequence",
    "image": "image classification",
    "speech": "speech to text",
    "ctc": "speech with CTC",
    "vision": "pictures and text",
    "torchvision": "torchvision",
    "timm": "timm",
}
PAGE = HERE.parent.parent / "docs" / "benchmarks" / "models.md"
CPU_LIMIT_S = 120
WALL_LIMIT_S = 480
MEMORY_LIMIT_BYTES = 10 << 30
STARTS = Lock()
"""Held while a process is forked: libraries refuse a fork beside another."""


def commit() -> str:
    """The commit of the checkout, with a plus where files of the product differ from it."""
    root = Path(__file__).parent.parent
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "src"], cwd=root).returncode
    return found + ("+" if changed else "")


def judge_apart(name: str, head: str, device: str) -> dict[str, Any]:
    """The row of an architecture, from a process of its own that is ended at the limits."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_judge_here, args=(name, head, device, sender))
    start_s = perf_counter()
    with STARTS:
        child.start()
    sender.close()
    row: dict[str, Any] = {"name": name, "head": head}
    try:
        if receiver.poll(WALL_LIMIT_S):
            row |= receiver.recv()
        else:
            child.kill()
            row["outcome"] = "timeout"
    except EOFError:
        child.join()
        killed = child.exitcode in (-24, -9)
        row["outcome"] = "timeout" if killed else "crash"
        row["reason"] = f"the process ended with {child.exitcode}"
    child.join()
    return row | {"wall_s": round(perf_counter() - start_s, 1)}


def _judge_here(name: str, head: str, device: str, sender: Connection) -> None:
    if device == "cpu":  # a GPU's driver reserves far more addresses than it uses
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_LIMIT_S, used + CPU_LIMIT_S + 5))
    sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    start_s = perf_counter()
    try:
        if head in ("torchvision", "timm"):
            row = judge_family(name, head, device)
        else:
            row = judge(getattr(transformers, name), head, device)
    except Exception as error:
        row = {"outcome": outcome_of(error), "reason": f"{type(error).__name__}: {error}"[:400]}
    sender.send(row | {"judged_s": round(perf_counter() - start_s, 2)})
    sender.close()


def load(path: Path) -> dict[str, Any]:
    """The results of earlier runs."""
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def save(path: Path, rows: Mapping[str, dict[str, Any]]) -> None:
    """Rows in order of head and name, with the machine."""
    order = list(KINDS)
    in_order = sorted(rows.values(), key=lambda r: (order.index(r["head"]), r["name"]))
    machine = {
        "date": strftime("%Y-%m-%d %H:%M"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cores": os.cpu_count(),
        "registered": len(registered()),
    }
    path.write_text(json.dumps({"machine": machine, "rows": in_order}, indent=1) + "\n")


def chosen(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Names and heads to judge."""
    if arguments.families:
        from families import registered_families

        pairs = registered_families()
    else:
        heads = arguments.heads.split(",") if arguments.heads else list(HEADS)
        pairs = [(name, head) for name, head in registered() if head in heads]
    if arguments.only:
        return [(name, head) for name, head in pairs if name in arguments.only]
    return pairs[:: max(1, len(pairs) // arguments.sample)] if arguments.sample else pairs


def judged(
    pairs: Sequence[tuple[str, str]], device: str, jobs: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and rows as they come, with ``jobs`` processes at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        made = {pool.submit(judge_apart, name, head, device): name for name, head in pairs}
        for one in as_completed(made):
            yield made[one], one.result()


def run(pairs: Sequence[tuple[str, str]], out: Path, arguments: argparse.Namespace) -> int:
    """Judge what is not there yet; how many are left."""
    rows = {row["name"]: row for row in load(out)["rows"]}
    again, most = arguments.again or bool(arguments.only), arguments.most
    made = {"commit": commit(), "date": strftime("%Y-%m-%d"), "torch": torch.__version__}
    wanted = [(name, head) for name, head in pairs if again or name not in rows]
    for name, row in judged(wanted[:most], arguments.device, arguments.jobs):
        rows[name] = row | made
        save(out, rows)
        reason = row.get("reason", "")[:150]
        print(f"{name:<50} {row['outcome']:<28} {row['wall_s']:6.1f} s  {reason}", flush=True)
    return max(0, len(wanted) - most)


def write_page(rows: Sequence[Mapping[str, Any]]) -> None:
    """Put the table of counts into the page: rows are kinds of models, columns are outcomes."""
    lines = [f"| registered as | {' | '.join(OUTCOMES)} | right of those that run |"]
    lines.append("|---" * (len(OUTCOMES) + 2) + "|")
    for head, words in (*KINDS.items(), ("", "**together**")):
        found = Counter(row["outcome"] for row in rows if head in ("", row["head"]))
        counts = " | ".join(str(found[outcome]) for outcome in OUTCOMES)
        share = sum(found[good] for good in GOOD) / (found.total() - found[OUTCOMES[-1]])
        lines.append(f"| {words} | {counts} | {100 * share:.1f} % |")
    head, _, rest = PAGE.read_text().partition("\n| registered as |")
    PAGE.write_text(head + "\n" + "\n".join(lines) + rest[rest.index("\n\n") :])


def main() -> int:
    """Judge the chosen architectures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--sample", type=int, default=0, metavar="N")
    parser.add_argument("--heads", default="", help=",".join(HEADS))
    parser.add_argument("--most", type=int, default=10**6, metavar="N", help="end after N rows")
    parser.add_argument("--again", action="store_true", help="also what was judged before")
    parser.add_argument("--families", action="store_true", help="torchvision and timm instead")
    parser.add_argument("--page", action="store_true", help="write the table of the page only")
    parser.add_argument("--device", default="cpu", help="where models run: cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models at a time")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if arguments.page:
        write_page(load(arguments.out)["rows"])
        return 0
    left = run(chosen(arguments), arguments.out, arguments)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
