"""Trains a job on the ranks that torchrun or srun has started, on one host or several.

The ranks that torchrun or srun has started for a job: rank 0 directs, the others follow.

Rank 0 does what `penstock train` does on one host: it measures, plans, records and reports. Where
it would start workers, it writes an order into the run's store, and all ranks carry it out. Before
they begin, each says whether it can, so that none waits for one that cannot.
"""

import json
import os
import platform
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from penstock.document import parse_json
from penstock.errors import BadInput, PenstockError, RunFailed, SaidByAnotherRank
from penstock.jobs.job import Job
from penstock.jobs.profile_job import CostedJob, cost_worker
from penstock.jobs.run_directory import RunDirectory
from penstock.jobs.train import TrainResult, job_as_asked, train_job
from penstock.jobs.train_request import Log, TrainRequest
from penstock.jobs.worker import Pauses, WorkerReport, WorkerTask, train_worker
from penstock.measure.workers import median_profile
from penstock.plan.json_file import plan_from_json, plan_to_json
from penstock.profile.json_file import profile_from_json, profile_to_json
from penstock.runtime.processes.launch import long_slices_if_crowded
from penstock.runtime.processes.store import RunStore, met_at
from penstock.runtime.processes.watch import WATCH, say_and_end
from penstock.runtime.processes.world import check_environment

__all__ = ["RankFacts", "check_alike", "train_on_ranks"]

SIGNALLED = 128
"""Exit codes above this one say which signal has ended the run."""


def train_on_ranks(job: Job, request: TrainRequest, *, log: Log) -> TrainResult | None:
    """Train ``job``; every rank must call this. Only rank 0 logs, records and has a result.

    The number of ranks that were started takes the place of ``request.workers``. A start after a
    failure, or after hosts have come or gone, resumes the run that this launch has begun.

    Raises:
        PenstockError: as `train_job`; on the rank that has failed first.
        SaidByAnotherRank: on all other ranks.
    """
    ranks = joined_ranks(job_as_asked(job, request))
    with ranks.saying_once():
        if ranks.rank:
            ranks.give_facts()
            end_with(ranks.follow(job_as_asked(job, request)))
            return None
        asked = replace(request, workers=ranks.size, resume=request.resume or goes_on(request))
        with ranks.directed():
            ranks.check_facts()
            return train_job(job, asked, log=log, workers=ranks)


def end_with(code: int) -> None:
    """End this rank as rank 0 ends, which has said why."""
    if code > SIGNALLED:
        raise SystemExit(code)
    if code:
        raise SaidByAnotherRank(code)


def goes_on(request: TrainRequest) -> bool:
    """Whether torchrun has started the ranks again, after the run had been planned.

    Its count of restarts stays the same when hosts come and go; then the launch's name tells it.
    """
    if request.out is None:
        return False
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    directory = RunDirectory(request.out)
    return (again and (request.out / "plan.json").exists()) or directory.is_of_this_launch


MEASURE, TRAIN, END = "measure", "train", "end"
"""The orders: measure at the same time, carry out a `WorkerTask`, end."""

GO, STOP = "go", "stop"

INTERRUPTED = 130

END_WITHIN_S, LOOK_EVERY_S = 5.0, 0.02
"""How long rank 0 waits for the others to end."""


@dataclass(frozen=True)
class RankFacts:
    """What a rank tells rank 0 of itself: where it is, and what must be alike on all."""

    host: str
    node: str
    alike: dict[str, str]


def joined_ranks(job: Job) -> "StartedRanks":
    """Meet the other ranks; all must call this.

    Raises:
        BadInput: the ranks have different versions or another job; on rank 0.
    """
    check_environment()
    long_slices_if_crowded()
    store, rank, size = met_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    ranks = StartedRanks(store, rank, size, facts_of(job))
    WATCH.give_up = ranks.give_up
    return ranks


def facts_of(job: Job) -> RankFacts:
    """The facts of this rank."""
    alike = {
        "penstock": version("penstock"),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "the job": f"'{job.name}' with {job.steps} steps of {job.batch_size} samples",
    }
    return RankFacts(socket.gethostname(), os.environ.get("GROUP_RANK", ""), alike)


def check_alike(facts: Sequence[RankFacts]) -> None:
    """Raise `BadInput` if a rank differs from rank 0, naming its host and what differs."""
    for rank, found in enumerate(facts):
        for thing, first in facts[0].alike.items():
            own = found.alike.get(thing, "none")
            if own != first:
                raise BadInput(
                    f"rank {rank} on host '{found.host}' has {thing} {own}, but rank 0 on host "
                    f"'{facts[0].host}' has {first}; install and start the same on all hosts"
                )


class StartedRanks:
    """This rank among those that were started. Rank 0 uses it as `RunWorkers`, others `follow`.

    ``store`` is the run's store. Keys of order ``n`` begin with ``penstock/order/n``.
    """

    def __init__(self, store: RunStore, rank: int, size: int, own: RankFacts) -> None:
        self.rank, self.size, self.host = rank, size, own.host
        self._store, self._orders, self._own = store, 0, own
        self._facts: tuple[RankFacts, ...] = ()

    def give_facts(self) -> None:
        """Tell rank 0 this rank's facts; all others call this."""
        self._store.set(f"penstock/facts/{self.rank}", json.dumps(asdict(self._own)))

    def check_facts(self) -> None:
        """Compare the ranks' facts; rank 0 calls this.

        Raises:
            BadInput: two ranks differ.
        """
        told = (self._read(f"penstock/facts/{rank}") for rank in range(1, self.size))
        self._facts = (self._own, *(RankFacts(**facts) for facts in told))
        check_alike(self._facts)

    @property
    def layout(self) -> tuple[int, ...]:
        """The number of ranks of each host, on rank 0."""
        groups = groupby(self._facts, key=lambda facts: (facts.host, facts.node))
        return tuple(len(list(group)) for _, group in groups)

    @contextmanager
    def directed(self) -> Generator[None]:
        """Within, rank 0 directs the others; afterwards they end with its exit code."""
        code = 0
        try:
            yield
        except BaseException as failure:
            code = exit_code_of(failure)
            raise
        finally:
            # An agent's store may have ended with the run.
            with suppress(RunFailed):
                self._end(code)

    @contextmanager
    def saying_once(self) -> Generator[None]:
        """Within, of all ranks that fail only the first says why.

        Raises:
            SaidByAnotherRank: in place of an error, where another rank has failed before.
        """
        try:
            yield
        except (SystemExit, SaidByAnotherRank):
            raise
        except BaseException as failure:
            if not self._says_why():
                raise SaidByAnotherRank(exit_code_of(failure)) from failure
            if self.rank and isinstance(failure, PenstockError) and "rank" not in str(failure):
                raise type(failure)(f"rank {self.rank} on host '{self.host}': {failure}") from None
            raise

    def give_up(self, failure: RunFailed) -> None:
        """End this process, whatever its main thread does; of all ranks the first says why."""
        if self._says_why():
            say_and_end(failure)
        os._exit(failure.exit_code)

    def _says_why(self) -> bool:
        """Whether this rank is the first that has failed, and so says why the run ends."""
        first = str(self.rank)
        with suppress(RunFailed):
            first = self._store.compare_set("penstock/said", "", str(self.rank)).decode()
        return first == str(self.rank)

    def measured(self, job: Job, request: TrainRequest, logs: Path) -> CostedJob:
        """See `RunWorkers`."""
        groups = [list(job.tensor_parallel.ranks), job.tensor_parallel.given]
        self._order({"do": MEASURE, "device": request.device, "tensor_groups": groups})
        own = costs_here(job, request.device)
        told = (profile_from_json(found, "a rank's profile") for found in self._reports())
        return CostedJob(median_profile([own.profile, *told]), own.cluster)

    def known(self, costs: CostedJob, request: TrainRequest) -> CostedJob | None:
        """See `RunWorkers`; only costs that were measured on as many ranks of as many hosts."""
        layout = tuple(len(host.devices) for host in costs.cluster.hosts)
        return costs if layout == self.layout else None

    def train(self, task: WorkerTask, count: int, logs: Path) -> tuple[WorkerReport, ...]:
        """See `RunWorkers`; other ranks report their memory, and whether SIGTERM has come."""
        self._order(order_of(task))
        own = train_worker(task)
        return (own, *(replace(own, **found) for found in self._reports()))

    def follow(self, job: Job) -> int:
        """Carry out rank 0's orders until the end; returns the exit code. All but rank 0 call this.

        Raises:
            BadInput: this rank cannot carry out an order.
            RunFailed: the run failed.
        """
        while True:
            number = self._orders = self._orders + 1
            order: dict[str, Any] = self._read(f"penstock/order/{number}")
            refusal = refusal_of(order, self.host)
            self._store.set(f"penstock/order/{number}/answer/{self.rank}", json.dumps(refusal))
            if order["do"] == END:
                return int(order["exit_code"])
            if self._read(f"penstock/order/{number}/go") == GO:
                report = carried_out(order, job)
                self._store.set(f"penstock/order/{number}/report/{self.rank}", json.dumps(report))

    def _end(self, code: int) -> None:
        """Give the last order; stay until others have it, since this process may serve the store.

        A rank that has failed never reads it.
        """
        number = self._write({"do": END, "exit_code": code})
        keys = [f"penstock/order/{number}/answer/{rank}" for rank in self._others]
        deadline_s = time.monotonic() + END_WITHIN_S
        while not self._store.check(keys) and time.monotonic() < deadline_s:
            time.sleep(LOOK_EVERY_S)

    def _order(self, order: dict[str, Any]) -> None:
        """Give an order; raises `BadInput` if a rank cannot carry it out, before any begins."""
        number = self._write(order)
        answers = [self._read(f"penstock/order/{number}/answer/{rank}") for rank in self._others]
        refusals = [answer for answer in answers if answer]
        self._store.set(f"penstock/order/{number}/go", json.dumps(STOP if refusals else GO))
        if refusals:
            raise BadInput(refusals[0])

    def _write(self, order: dict[str, Any]) -> int:
        """Write the next order; returns its number."""
        self._orders += 1
        self._store.set(f"penstock/order/{self._orders}", json.dumps(order))
        return self._orders

    def _reports(self) -> list[Any]:
        """What the other ranks report of the latest order, by rank."""
        return [self._read(f"penstock/order/{self._orders}/report/{rank}") for rank in self._others]

    @property
    def _others(self) -> range:
        return range(1, self.size)

    def _read(self, key: str) -> Any:
        """A JSON value in the store; waits for it as long as the ranks answer."""
        self._store.wait([key])
        return parse_json(self._store.get(key).decode(), key, "message")


def exit_code_of(failure: BaseException) -> int:
    """The exit code with which a process ends after ``failure``."""
    match failure:
        case PenstockError():
            return failure.exit_code
        case SystemExit(code=int(code)):
            return code
        case KeyboardInterrupt():
            return INTERRUPTED
        case _:
            return RunFailed.exit_code


def costs_here(job: Job, device: str) -> CostedJob:
    """What this rank measures while all others measure too."""
    try:
        return cost_worker(job, device)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def order_of(task: WorkerTask) -> dict[str, Any]:
    """The order to carry out ``task``; every rank has the job already."""
    return {
        "do": TRAIN,
        "plan": plan_to_json(task.plan),
        "directory": str(task.directory.absolute()),
        "resume_from": str(task.resume_from.absolute()) if task.resume_from else "",
        "has_weights": task.job.weights is not None,
        "device": task.device,
        "timeout_s": task.timeout_s,
        "pauses": [task.pauses.checkpoints, task.pauses.drift],
    }


def task_of(order: dict[str, Any], job: Job) -> WorkerTask:
    """The task of an order."""
    return WorkerTask(
        job if order["has_weights"] else replace(job, weights=None),
        plan_from_json(order["plan"], "rank 0's plan"),
        Path(order["directory"]),
        Path(order["resume_from"]) if order["resume_from"] else None,
        order["device"],
        shown=False,
        timeout_s=order["timeout_s"],
        pauses=Pauses(*order["pauses"]),
    )


def refusal_of(order: dict[str, Any], host: str) -> str:
    """Why a rank on ``host`` cannot carry out an order; empty if it can."""
    remedy = "put the run directory on a disk that all hosts share, and name it with --out"
    for key in ("directory", "resume_from"):
        if order.get(key) and not Path(order[key]).exists():
            return f"host '{host}' has no '{order[key]}'; {remedy}"
    return ""


def carried_out(order: dict[str, Any], job: Job) -> Any:
    """Carry out an order; returns this rank's report as a JSON value."""
    if order["do"] == MEASURE:
        sizes, given = order["tensor_groups"]
        settings = replace(job.tensor_parallel, ranks=tuple(sizes), given=given)
        asked = replace(job, tensor_parallel=settings)
        return profile_to_json(costs_here(asked, order["device"]).profile)
    report = train_worker(task_of(order, job))
    return {
        "peak_memory_bytes": report.peak_memory_bytes,
        "terminated": report.terminated,
    }
