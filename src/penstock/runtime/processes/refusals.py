"""A refusal that ends a script is one line, under torchrun of rank 0 alone, not a traceback."""

import os
import sys
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from penstock.errors import BadInput, Infeasible

SAID_WITHIN = timedelta(seconds=30)
"""Time for which a rank waits for rank 0 to print the same refusal, before it prints its own."""


def print_refusals_once() -> None:
    """Have Python print what ends this process, if that is a refusal, in one line on rank 0."""
    if getattr(sys.excepthook, "func", None) is not print_refusal:
        sys.excepthook = partial(print_refusal, sys.excepthook)


def print_refusal(otherwise: Any, kind: type[BaseException], error: Any, trace: Any) -> None:
    """Print a refusal, unless rank 0 prints the same; other errors go to the hook ``otherwise``."""
    if not isinstance(error, BadInput | Infeasible):
        otherwise(kind, error, trace)
        return
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    rank = int(os.environ["RANK"]) if by_agent else 0
    # To the stream of the process: torch holds back what its own hook prints, until this returns.
    line = partial(print, f"error: {error}", file=sys.__stderr__, flush=True)
    if rank == 0:
        line()
    if not by_agent:
        return
    key = f"penstock/refused/{error}"
    try:
        at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store: Any = dist.TCPStore(*at, is_master=False, timeout=SAID_WITHIN)  # pyright: ignore[reportPrivateImportUsage]
        if rank == 0:
            store.set(key, "printed")
        else:
            store.wait([key], SAID_WITHIN)
    except Exception:  # the agent has ended, or rank 0 has printed nothing of the kind
        if rank:
            line()
