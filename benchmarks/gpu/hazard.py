"""Part 1.5: receives that occupy the device before kernels have run for the first time.

NCCL's receives are kernels that wait on the device until the peer sends. Where kernels are loaded
at their first launch, CUDA may wait for the device to be idle, which it is not while such a receive
waits for what this very launch is to make. No peer and no NCCL are needed to see it: a kernel that
spins on a flag of the host's memory stands for the receive, and the host sets the flag, as the peer
would send, once the forward has run.

Each order is played in a process of its own, which is stopped if it does not end.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, sleep

import torch
from rows import Row, Setting, told, under
from torch import nn

KERNEL = """
extern "C" __global__ void spin(volatile int* flag, int limit) {
  const long long start = clock64();
  while (*flag == 0 && (clock64() - start) >> 20 < limit) {}
}
"""

LIMIT_MEGACYCLES = 20_000
"""Ten seconds at 2 GHz: a kernel that never ended would keep the GPU."""

STUCK_S = 5.0
"""A forward and backward takes milliseconds."""

ENDS_WITHIN_S = 45.0

ORDERS = ("posted ahead", "posted ahead, stages warmed up", "posted behind the launches")


def receives_before_first_launches(setting: Setting) -> Iterator[Row]:
    """Seconds until the forward has run, in each order."""
    for order in ORDERS:
        command = [sys.executable, __file__, order] + ["--stand-in"] * setting.stand_in
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        environment = os.environ | {"CUDA_MODULE_LOADING": "LAZY", "PYTHONPATH": path}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=ENDS_WITHIN_S
            )
        except subprocess.TimeoutExpired:
            taken_s, last = float("inf"), f"stopped after {ENDS_WITHIN_S:g} s"
        else:
            last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
            if done.returncode:
                yield Row("1.5", order, last[:300], "failed")
                continue
            taken_s = float(last)
        yield judged(order, taken_s, setting)


def judged(order: str, taken_s: float, setting: Setting) -> Row:
    """The row of an order; the first is not one of Penstock's, and shows that one can be stuck."""
    if order == ORDERS[0]:
        seen = "stuck" if taken_s > STUCK_S else "not stuck"
        row = told("1.5", f"{order}, which nothing does", seen, seconds=taken_s)
    else:
        row = under("1.5", f"{order}: seconds of a forward", taken_s, STUCK_S, "s")
    return setting.by_device(row)


def play(order: str, *, stand_in: bool) -> float:
    """Seconds from the launches to the end of a forward and backward; the flag is set behind it."""
    if stand_in:
        import stand_in_gpu

        stand_in_gpu.install(devices=1)
    spin = spinning_kernel(stand_in=stand_in)
    device = torch.device("cuda", 0)
    flag = torch.zeros(1, dtype=torch.int32).pin_memory()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.LazyLinear(16))
    model(torch.zeros(2, 3, 16, 16))
    model, pictures = model.to(device), torch.randn(2, 3, 16, 16).to(device)
    torch.cuda.synchronize()
    if "warmed up" in order:
        model(pictures).sum().backward()
        torch.cuda.synchronize()
    receiving = torch.cuda.Stream()
    start_s = perf_counter()
    if "ahead" in order:
        spin(receiving, flag)
    model(pictures).sum().backward()
    ended = torch.cuda.Event()
    ended.record()
    if "ahead" not in order:
        spin(receiving, flag)
    while not ended.query():
        sleep(1e-4)
    taken_s = perf_counter() - start_s
    flag.fill_(1)  # what this rank sent has made the peer send
    torch.cuda.synchronize()
    return taken_s


def spinning_kernel(*, stand_in: bool) -> Callable[[torch.cuda.Stream, torch.Tensor], None]:
    """Launches on a stream what waits for a flag; on the stand-in nothing waits."""
    if stand_in:
        return lambda stream, flag: None
    kernel = torch.cuda._compile_kernel(KERNEL, "spin")

    def launch(stream: torch.cuda.Stream, flag: torch.Tensor) -> None:
        kernel((1, 1, 1), (1, 1, 1), [flag, LIMIT_MEGACYCLES], stream=stream)

    return launch


if __name__ == "__main__":
    print(play(sys.argv[1], stand_in="--stand-in" in sys.argv))
