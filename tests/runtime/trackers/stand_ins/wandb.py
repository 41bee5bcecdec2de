"""Stands in for Weights & Biases: the signatures that Penstock calls, with a file for a server.

TOLD names the file. TROUBLE is "init", "log" or "finish" to raise there.
"""

import json
import os
from typing import Any


def tell(what: str, **values: Any) -> None:
    with open(os.environ["TOLD"], "a") as file:
        file.write(f"{json.dumps({'call': what, **values})}\n")


def trouble_at(place: str) -> None:
    if os.environ.get("TROUBLE") == place:
        raise ConnectionError(f"the server is away ({place})\nsecond line")


class Run:
    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        trouble_at("log")
        tell("log", step=step, values=data)

    def finish(self, exit_code: int | None = None) -> None:
        trouble_at("finish")
        tell("finish")


def init(
    *,
    project: str | None = None,
    name: str | None = None,
    config: dict[str, Any] | None = None,
    dir: str | None = None,
    resume: str | None = None,
    id: str | None = None,
) -> Run:
    print("wandb: a banner")
    trouble_at("init")
    tell("init", project=project, name=name, config=config, id=id, resume=resume)
    return Run()
