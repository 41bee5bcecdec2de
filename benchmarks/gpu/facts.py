"""Part 1.1: what is here, and the tests of a GPU."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import torch
from rows import Row, Setting, told, under

HERE = Path(__file__).parent
TESTS = HERE.parent.parent / "tests"


def facts(setting: Setting) -> Iterator[Row]:
    """Versions and memory, then `pytest -m cuda` of the device's own tests."""
    properties = torch.cuda.get_device_properties(setting.device)
    free, whole = torch.cuda.mem_get_info(setting.device)
    found = f"{properties.name}, {free / 1e9:.1f} of {whole / 1e9:.1f} GB free"
    yield told("1.1", "device", found, free_bytes=free, memory_bytes=whole)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {platform.python_version()}"
    yield told("1.1", "versions", versions, cores=os.cpu_count())
    yield from tests_of_a_gpu(setting)


def tests_of_a_gpu(setting: Setting) -> Iterator[Row]:
    """One row for all, and one for each that fails. The stand-in's are those on the CPU."""
    report, empty = setting.out / "tests.xml", setting.out / "pytest.ini"
    empty.write_text("[pytest]\nmarkers =\n    cuda\n    timeout\n")
    chosen = ["-k", "random or memory"] if setting.small else []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda"]
    command += ["-c", str(empty), "--noconftest", "-p", "no:cacheprovider", *chosen]
    command += [f"--junitxml={report}", str(TESTS / "cuda" / "test_device_on_cuda.py")]
    here = [str(HERE), str(TESTS), str(TESTS.parent / "src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(here)}
    if setting.stand_in:
        environment["PENSTOCK_TEST_DEVICE"] = "cpu"
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if not report.exists():
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        yield Row("1.1", "pytest -m cuda", " ".join(last)[:300], "failed")
        return
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    for case in failed:
        problem = next(iter(case))
        text = problem.get("message", "").splitlines()[:1]
        yield Row("1.1", case.get("name", ""), " ".join(text)[:300], "wrong")
    skipped = sum(case.find("skipped") is not None for case in cases)
    counts = {"tests": len(cases), "skipped": skipped}
    # No test, or one that is skipped, shows nothing; on the CPU there are things that it lacks.
    nothing = (0 if setting.stand_in else skipped) + (not cases)
    yield under("1.1", f"of {len(cases)} tests without success", len(failed) + nothing, 0, **counts)
