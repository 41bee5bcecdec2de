"""Runs the CP-SAT solver of OR-Tools in a process of its own, which a defect of the solver can end.

OR-Tools 9.15 aborts its process on some models whose intervals share a resource ("Check failed:
threshold > 0"), while it derives cuts from the linear relaxation. Here the abort ends a child. The
model is then solved again without cuts.

Parent and child exchange one line of JSON for each model and each answer. The child stays for the
next model, because loading the solver takes longer than most solutions.
"""

# The solver's package is only partly typed.
# pyright: basic

import atexit
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

__all__ = ["SolverAnswer", "solved"]

COMMAND = [sys.executable, str(Path(__file__))]

ONE_AT_A_TIME = Lock()
"""A child answers one thread after another."""


@dataclass(frozen=True)
class SolverAnswer:
    """The value of every variable by its index, and a lower bound on the objective."""

    values: tuple[int, ...]
    bound: float


def solved(model: str, *, work_limit: float, time_limit_s: float) -> SolverAnswer | None:
    """Minimise a model, given as the text of its protocol buffer.

    The solver stops after ``work_limit`` units of its deterministic time, or ``time_limit_s``
    seconds. Without cuts one unit takes ten times as many seconds, so there are a tenth of them.
    None, if no solution was found in time, or the process ended with cuts and without.
    """
    for limits in ({"work": work_limit}, {"work": work_limit / 10, "cut_level": 0}):
        line = json.dumps({"model": model, "seconds": time_limit_s, **limits})
        with ONE_AT_A_TIME:
            answer = answered(line)
        if answer:
            values, bound = json.loads(answer)
            return SolverAnswer(tuple(values), bound) if values else None
    return None


def answered(line: str) -> str:
    """The child's line for one model; empty if a signal ended the child.

    Raises:
        RuntimeError: the child ended by itself, for example because it could not be started.
    """
    # A forked process gets a child of its own: two must not write into one pipe.
    child = started_child(os.getpid())
    try:
        assert child.stdin and child.stdout
        child.stdin.write(line + "\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    except BrokenPipeError:
        answer = ""
    except BaseException:
        # Interrupted. The next model must not read this one's answer.
        end_child(child)
        raise
    if not answer:
        # Its output has ended, so it ends.
        code = child.wait()
        end_child(child)
        if code > 0:
            command = " ".join(COMMAND)
            raise RuntimeError(f"the solver's process ended with exit code {code}; try: {command}")
    return answer


@cache
def started_child(parent: int) -> "subprocess.Popen[str]":
    """The child of the process with the number ``parent``, which is the calling one."""
    child = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # An abort writes a page of addresses.
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(end_own_child, child, parent)
    return child


def end_child(child: "subprocess.Popen[str]") -> None:
    """End a child. The next model starts another one."""
    started_child.cache_clear()
    atexit.unregister(end_own_child)
    child.kill()
    child.communicate()


def end_own_child(child: "subprocess.Popen[str]", parent: int) -> None:
    """End a child at the end of its parent, and not at the end of the parent's forks."""
    if os.getpid() == parent:
        end_child(child)


def serve() -> None:
    """Answer a line for each line of the input, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ortools.sat.python import cp_model

    for line in sys.stdin:
        task = json.loads(line)
        model = cp_model.CpModel()
        model.proto.parse_text_format(task["model"])
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        # With linear relaxations and their cuts, proofs about memory of stages that share a device
        # are much faster.
        solver.parameters.linearization_level = 2
        solver.parameters.cut_level = task.get("cut_level", solver.parameters.cut_level)
        solver.parameters.max_time_in_seconds = task["seconds"]
        solver.parameters.max_deterministic_time = task["work"]
        found = solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        values = list(solver.response_proto.solution) if found else []
        sys.stdout.write(json.dumps([values, solver.best_objective_bound]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
