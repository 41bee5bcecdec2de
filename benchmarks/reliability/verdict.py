"""Requirements on a broken run, and on the run that continues it."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from faults import STEPS, Fault
from runs import APART, Place, Run, kill_all, read

GONE_S = 60.0
"""Seconds in which the last process of a run must be gone once its first has ended."""
LONGEST_LINE = 600
SHARED = Path("/dev/shm")


def flaws_of_end(run: Run, fault: Fault, before: Sequence[str]) -> Iterator[str]:
    """Faults of the end of a broken run; ``before`` are the checkpoints it had."""
    in_time = run.is_over()
    if not in_time:
        yield "did not end in time"
    yield from flaws_of_processes(run)
    fault.code = run.code
    text = run.said()
    lines = [line for line in text.splitlines() if line.startswith("penstock: ")]
    fault.message = lines[-1] if lines else ""
    if "Traceback" in text:
        yield "a traceback was printed"
        fault.said = text[max(0, text.index("Traceback") - 300) :][:1500]
    was_killed = fault.code == -9
    if fault.code and not was_killed and not lines and fault.kind != "terminate":
        yield f"ended with {fault.code} without a message"
    if len(fault.message) > LONGEST_LINE:
        yield f"a message of {len(fault.message)} characters"
    if before and not any(path.name >= before[-1] for path in run.place.complete()):
        yield f"checkpoint {before[-1]} is lost"
    if not was_killed and (left_over := left_in(run, fault)):
        yield f"left in TMPDIR: {left_over[0]}"
    if in_time and (shared := shared_memory()):
        yield f"left in /dev/shm: {shared[0]}"
    if not in_time:
        clean_up_after(run)


def clean_up_after(run: Run) -> None:
    """Remove what a run has left that was killed with all its processes."""
    for path in [*run.place.temporary.iterdir(), *map(SHARED.joinpath, shared_memory())]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def flaws_of_processes(run: Run) -> Iterator[str]:
    """Processes that a run has left behind, which are killed then."""
    deadline_s = time.monotonic() + (GONE_S if run.is_over() else 0.0)
    while (left := run.everyone()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    if left and run.is_over():
        names = [f"{run.name_of(pid)} {read(f'/proc/{pid}/cmdline')[-50:]!r}" for pid in left]
        yield f"{len(left)} processes left: {', '.join(names)}"
    kill_all(left)
    run.wait(GONE_S)


def flaws_of_resumed(run: Run, fault: Fault, expected: Mapping[str, bytes]) -> Iterator[str]:
    """Faults of a resumed run; ``expected`` are the tensors of an unbroken one."""
    if not run.is_over():
        kill_all(run.everyone())
        run.wait(GONE_S)
        yield "the resumed run did not end in time"
        return
    had_taken_all = f"the run has taken {STEPS} steps already" in run.said()
    if run.code and not had_taken_all:
        yield f"resuming ended with {run.code}: {run.said().splitlines()[-1:]}"
        return
    rows = map(json.loads, (run.place.run / "metrics.jsonl").read_text().splitlines())
    if [row["step"] for row in rows if "loss" in row] != list(range(1, STEPS + 1)):
        yield "steps are missing or recorded twice"
    if expected and tensors_of(run.place) != expected:
        yield "weights differ from an unbroken run's"
    if left_over := left_in(run, fault):
        yield f"left in TMPDIR after resuming: {left_over[0]}"
    if shared := shared_memory():
        yield f"left in /dev/shm after resuming: {shared[0]}"


def left_in(run: Run, fault: Fault) -> list[str]:
    """Names left in the temporary directory, without tracebacks to which the message points."""
    names = [path.name for path in run.place.temporary.iterdir()]
    return [name for name in names if name not in fault.message]


def shared_memory() -> list[str]:
    """The names in /dev/shm, if no other programs write there."""
    return sorted(path.name for path in SHARED.iterdir()) if APART in os.environ else []


def tensors_of(place: Place) -> dict[str, bytes]:
    """Every tensor of the last checkpoint by name, as bytes: weights, optimizer, random numbers."""
    import torch

    from penstock.runtime.weights.safetensors_file import read_header, read_into

    found: dict[str, bytes] = {}
    for file in sorted((place.checkpoints / f"step-{STEPS:08d}").glob("*.safetensors")):
        for name, stored in read_header(file).items():
            tensor = torch.empty(stored.shape, dtype=stored.dtype)
            read_into([(stored, tensor)])
            found[name] = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return found
