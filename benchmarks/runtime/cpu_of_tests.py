"""CPU seconds of the test command, user and system, of all its processes.

    python benchmarks/runtime/cpu_of_tests.py [--out FILE] [-- PYTEST ARGUMENTS]

Processes that tests start and wait for count too.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter, strftime

LIMIT_S = 22 * 60.0


def main() -> None:
    """Run the tests, pass on what they print, and say what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("given", nargs="*", help="for pytest")
    arguments = parser.parse_args()
    start, load = perf_counter(), os.getloadavg()[0]
    done = subprocess.run([sys.executable, "-m", "pytest", *arguments.given], check=False)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {
        "date": strftime("%Y-%m-%d %H:%M"),
        "load_before": load,
        "exit_code": done.returncode,
        "wall_s": perf_counter() - start,
        "user_s": used.ru_utime,
        "system_s": used.ru_stime,
        "cpu_s": used.ru_utime + used.ru_stime,
        "limit_s": LIMIT_S,
    }
    print(json.dumps(found))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(done.returncode or found["cpu_s"] > LIMIT_S)


if __name__ == "__main__":
    main()
