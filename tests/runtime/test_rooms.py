"""A training step loads the rooms that it uses, and a plain one none."""

import json
import os
import subprocess
import sys

import pytest

ASYNCHRONOUS = "penstock.runtime.asynchronous"
MEETING = "penstock.runtime.update.local_sgd"
SHARED_MEMORY = "penstock.runtime.transport.shared_memory"


@pytest.mark.parametrize(
    ("case", "used"),
    [
        (("1f1b", "process-groups"), set[str]()),
        pytest.param(("1f1b", "in-process"), set[str](), marks=pytest.mark.slow),
        (("pipedream", "in-process"), {ASYNCHRONOUS}),
        (("1f1b", "shared-memory"), {SHARED_MEMORY}),
    ],
)
def test_steps_load_only_the_rooms_that_they_use(case: tuple[str, ...], used: set[str]) -> None:
    command = [sys.executable, "-m", "runtime.walk_cases", *case]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    assert "penstock.runtime.engine" in modules
    rooms = {ASYNCHRONOUS, MEETING, SHARED_MEMORY}
    assert {room for room in rooms if any(name.startswith(room) for name in modules)} == used
