"""Rank of this process among several; srun's variables are translated to torchrun's.

Source: the page of srun in Slurm's manual, section "output environment variables" (Slurm 24.05).
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import BadInput

FIRST_PORT, PORTS = 20_000, 10_000
"""The ports that runs use. A run takes one by the number of its Slurm job, as torchrun has none."""


@dataclass(frozen=True)
class OneOfSeveral:
    """This process's number among those that were started together, and how many there are."""

    rank: int
    ranks: int


def one_of_several() -> OneOfSeveral:
    """Return this process's rank by torchrun or srun; under srun, torchrun's variables are set.

    Torch prints warnings that concern no user of several ranks; call this before it is imported.
    """
    if "WORLD_SIZE" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        os.environ |= as_torchrun(os.environ)
    rank, ranks = (int(os.environ.get(*named)) for named in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if ranks > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return OneOfSeveral(rank, ranks)


def as_torchrun(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun from those of srun; an address or port that is given stays.

    >>> step = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    >>> step |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    >>> step |= {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "40123"}
    >>> found = as_torchrun(step)
    >>> found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"], found["MASTER_PORT"]
    ('3', '4', 'gpu07', '20123')
    """
    try:
        node = int(variables["SLURM_NODEID"])
        tasks = tasks_of_nodes(variables["SLURM_STEP_TASKS_PER_NODE"])
        port = FIRST_PORT + int(variables["SLURM_JOB_ID"]) % PORTS
        return {
            "RANK": variables["SLURM_PROCID"],
            "LOCAL_RANK": variables["SLURM_LOCALID"],
            "GROUP_RANK": variables["SLURM_NODEID"],
            "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
            "LOCAL_WORLD_SIZE": str(tasks[node]),
            "MASTER_ADDR": variables.get("MASTER_ADDR")
            or first_host(variables["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": variables.get("MASTER_PORT") or str(port),
        }
    except (KeyError, ValueError, IndexError) as cause:
        raise BadInput(
            f"srun has started this process, but its variables do not say where it is "
            f"({type(cause).__name__}: {cause}); start the ranks with srun itself, or with torchrun"
        ) from cause


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it.

    >>> first_host("a[07-09,12],b3"), first_host("login,b"), first_host("r[1-2]n[03-04]")
    ('a07', 'login', 'r1n03')
    """
    first, depth = "", 0
    for letter in nodes:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            break
        first += letter
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def tasks_of_nodes(text: str) -> list[int]:
    """The number of tasks on each node.

    >>> tasks_of_nodes("2(x3),1")
    [2, 2, 2, 1]
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"'{text}' names no tasks")
        found += [int(match[1])] * int(match[2] or 1)
    return found
