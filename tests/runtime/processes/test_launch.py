"""Worker processes start together and end together, whatever happens."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runtime.processes.workers_under_test import (
    add_ranks,
    collected_and_imported,
    collective_after_a_death,
    fail,
    fail_after_a_peer_noticed,
    fail_without_a_folder,
    fail_without_the_store,
    kill_the_server,
    listening_addresses,
    many_bytes,
    parent_and_variable,
    threads_and_rank,
)

from penstock.errors import BadInput, RunFailed, Stalled
from penstock.runtime.processes import launch
from penstock.runtime.processes.launch import launch_workers

TESTS = Path(__file__).parents[2]

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from runtime.processes.workers_under_test import sleep_for_ever
from penstock.runtime.processes.launch import launch_workers

if __name__ == "__main__":
    try:
        launch_workers(sleep_for_ever, (Path(sys.argv[2]),), workers=2)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def wait_until(condition: Callable[[], bool], limit_s: float) -> float:
    """Seconds until the condition held; fails the test after ``limit_s``."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, f"not so after {limit_s} s"
        time.sleep(0.05)
    return time.monotonic() - start


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def running_launcher(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A process that launched two workers which sleep; and the workers' process numbers.

    A parameter is the command that starts it.
    """
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    # The path of a socket has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="p-") as temporary:
        (tmp_path / "temporary").symlink_to(temporary)
        environment = {**os.environ, "TMPDIR": temporary}
        command = [*getattr(request, "param", []), sys.executable, script, TESTS, pids]
        launcher = subprocess.Popen(command, env=environment)
        try:
            wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, 60)
            yield launcher, [int(line.split()[1]) for line in pids.read_text().splitlines()]
        finally:
            launcher.kill()
            launcher.wait()


def test_a_temporary_directory_with_a_long_path_is_named(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", TESTS, tmp_path / "pids"],
        env={**os.environ, "TMPDIR": str(long)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        f"has {len(str(long))} characters, too many for a socket in it; set TMPDIR" in done.stderr
    )


def test_results_that_a_pipe_does_not_hold_are_read_while_the_workers_live() -> None:
    found = launch_workers(many_bytes, (1 << 20,), workers=2)
    assert [len(each) for each in found] == [1 << 20, 1 << 20]


def test_results_come_back_in_order_of_rank_with_a_process_group() -> None:
    assert launch_workers(add_ranks, workers=3) == (3, 3, 3)


def test_no_launch_leaves_a_handle_open() -> None:
    """Without Python's search for objects that refer to themselves, which may come late."""

    def handles() -> int:
        return len(os.listdir("/proc/self/fd"))

    counts: list[int] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            launch_workers(add_ranks, workers=2)
            counts.append(handles())
        for _ in range(2):
            with pytest.raises(RunFailed, match="was killed by SIGKILL"):
                launch_workers(collective_after_a_death, (1,), workers=2)
            counts.append(handles())
    finally:
        gc.enable()
    assert len(set(counts)) == 1, counts


def test_the_server_imports_what_optimizers_do_and_the_launcher_does_not() -> None:
    """Each takes seconds; workers collect what they make, and not what the server has imported."""
    assert launch_workers(collected_and_imported, workers=2) == ((True, True, True),) * 2
    program = "import sys, penstock.train.train; print({'torch._dynamo', 'sympy'} & {*sys.modules})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n", done.stderr


def test_workers_have_the_threads_that_were_asked_for_or_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "usable_cores", lambda: 1)
    for threads in (1, 0):
        found = launch_workers(threads_and_rank, workers=2, threads=threads)
        assert found == ((0, 1, "1"), (1, 1, "1"))


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_workers_of_all_launches_are_forks_of_one_server_that_see_what_has_changed_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ((first, before),) = launch_workers(parent_and_variable, ("PENSTOCK_CHANGED",), workers=1)
    monkeypatch.setenv("PENSTOCK_CHANGED", "yes")
    found = launch_workers(parent_and_variable, ("PENSTOCK_CHANGED",), workers=2)
    assert before is None
    assert found == ((first, "yes"), (first, "yes"))
    assert first != os.getpid()
    # Forks of a process with further threads could hang.
    assert len(list(Path(f"/proc/{first}/task").iterdir())) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which sockets listen")
def test_store_and_ranks_listen_on_loopback_only() -> None:
    of_ranks = launch_workers(listening_addresses, workers=2)
    for store, own in of_ranks:
        assert store == ["0100007F"]
        assert own
        assert set(own) == {"0100007F"}


def test_an_error_of_ours_comes_back_and_only_others_leave_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launch_workers(threads_and_rank, workers=1)
    assert not list(tmp_path.glob("penstock-*"))
    with pytest.raises(BadInput, match=r"^batch size 7 is not 8; drop the last batch$"):
        launch_workers(fail, ("ours", 1), workers=2)
    assert not list(tmp_path.glob("penstock-*"))
    with pytest.raises(RunFailed, match="penstock-workers-"):
        launch_workers(fail, ("foreign", 0), workers=1)
    assert len(list(tmp_path.glob("penstock-workers-*/worker-0-traceback.txt"))) == 1


def test_any_other_error_is_one_line_that_names_rank_place_and_traceback(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"worker 0: ValueError: no such thing \(.*:\d+\)") as found:
        launch_workers(fail, ("foreign", 0), workers=2, log_directory=tmp_path)
    assert "\n" not in str(found.value)
    assert "Traceback" in (tmp_path / "worker-0-traceback.txt").read_text()
    assert str(tmp_path / "worker-0-traceback.txt") in str(found.value)


def test_a_failure_is_told_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"worker 0: ValueError: no such thing .* no traceback in"):
        launch_workers(
            fail_without_a_folder, (tmp_path / "logs",), workers=1, log_directory=tmp_path / "logs"
        )


def test_a_failure_is_told_where_the_store_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(Stalled, match=r"^rank 0 waited 60 s for an answer$"):
        launch_workers(fail_without_the_store, workers=1, log_directory=tmp_path)


def test_a_rank_that_says_what_is_wrong_comes_before_one_that_only_noticed() -> None:
    with pytest.raises(RunFailed, match="rank 0 has no more memory"):
        launch_workers(fail_after_a_peer_noticed, workers=2)


def test_a_killed_worker_is_named_although_its_peers_fail_too() -> None:
    with pytest.raises(RunFailed, match=r"worker 1 .* was killed by SIGKILL"):
        launch_workers(collective_after_a_death, (1,), workers=3)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_workers_whose_server_is_killed_are_ended_and_the_server_is_named(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(RunFailed, match="the server that forks the workers was killed"):
        launch_workers(kill_the_server, (pids,), workers=2)
    started = [int(line.split()[1]) for line in pids.read_text().splitlines()]
    wait_until(lambda: not any(alive(pid) for pid in started), 5)
    assert launch_workers(threads_and_rank, workers=1, threads=1) == ((0, 1, "1"),)


def test_fewer_than_one_worker_is_refused() -> None:
    with pytest.raises(BadInput, match="workers is 0; at least 1"):
        launch_workers(print, workers=0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_launcher_leaves_no_orphans(
    running_launcher: tuple[subprocess.Popen[bytes], list[int]], number: signal.Signals, code: int
) -> None:
    launcher, workers = running_launcher
    launcher.send_signal(number)
    assert launcher.wait(15) == code
    assert not any(alive(pid) for pid in workers)


@pytest.mark.parametrize("running_launcher", [["nohup"]], indirect=True)
def test_a_launcher_that_nohup_has_started_survives_its_terminal(
    running_launcher: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    launcher, workers = running_launcher
    launcher.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(1)
    assert all(alive(pid) for pid in workers)


def test_workers_die_with_a_launcher_that_was_killed(
    running_launcher: tuple[subprocess.Popen[bytes], list[int]], tmp_path: Path
) -> None:
    launcher, workers = running_launcher
    assert any((tmp_path / "temporary").glob("pymp-*"))
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait(15)
    wait_until(lambda: not any(alive(pid) for pid in workers), 5)
    wait_until(lambda: not any((tmp_path / "temporary").glob("pymp-*")), 15)


def test_an_import_and_a_launch_leave_hooks_and_the_users_fork_server_as_they_are(
    tmp_path: Path,
) -> None:
    """Only the server itself removes the folder that the variable names."""
    (kept := tmp_path / "kept").mkdir()
    code = (
        "import sys; from multiprocessing import forkserver\n"
        "forkserver.set_forkserver_preload(['json'])\n"
        "from penstock.runtime.processes import launch\n"
        "launch.ensure_fork_server()\n"
        "assert sys.excepthook is sys.__excepthook__\n"
        "assert forkserver._forkserver._preload_modules == ['json']\n"
    )
    variables = os.environ | {"PENSTOCK_SOCKET_FOLDER": str(kept)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env=variables)
    assert kept.is_dir()


AT_A_PROMPT = """
import torch, penstock
from torch import nn
from penstock.plan.plan import Plan, Stage

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.second(self.first(x))

class Losses(list):
    pass

def train(steps, workers):
    torch.manual_seed(0)
    net, batch = Net(), (torch.randn(8, 4), torch.randn(8, 2))
    last = (workers - 1,)
    plan = Plan((Stage(range(1), (0,), (4,)), Stage(range(1, 3), last, (4,))), 2, 4, "1f1b")
    one = Plan((Stage(range(3), (0,), (4,)),), 2, 4, "1f1b")
    plan, loss = plan if workers > 1 else one, nn.functional.mse_loss
    with penstock.Pipeline(net, batch, plan=plan, loss=loss,
                           optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as pipe:
        return Losses(pipe.step(batch).loss for _ in range(steps))

two = penstock.launch_workers(train, (3, 2), workers=2)
assert type(two[1]) is Losses and len(two[1]) == 3
assert all(abs(a - b) < 1e-6 for a, b in zip(two[1], train(3, 1)))
"""


def at_a_prompt(code: str) -> subprocess.CompletedProcess[str]:
    """What a notebook's kernel does: ``__main__`` is no file."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_what_a_notebook_defines_runs_in_workers() -> None:
    result = at_a_prompt(AT_A_PROMPT)
    assert result.returncode == 0, result.stderr


def test_without_cloudpickle_a_function_of_a_notebook_is_refused_in_one_line() -> None:
    without = "import sys; sys.modules['cloudpickle'] = None; import penstock, os\n"
    result = at_a_prompt(without + "print(penstock.launch_workers(os.getcwd, workers=1))")
    assert result.stdout == f"{(os.getcwd(),)}\n", result.stderr
    result = at_a_prompt(without + "def train(): pass\npenstock.launch_workers(train, workers=1)")
    assert result.stderr.splitlines()[-1] == (
        "penstock.errors.BadInput: 'train' is defined in a notebook or at a prompt, from which "
        "workers cannot import it: 'pip install cloudpickle', or define it in a module"
    )
