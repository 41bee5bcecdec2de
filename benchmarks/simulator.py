"""Speed of the simulator: playing orders, scoring plans.

    python benchmarks/simulator.py [--json] [--out results.json] [--only PART]

Parts: ``playing``, ``scoring``. Seconds are processor seconds of one
core, because other work may share the machine. Compiled code is loaded before anything is timed.
"""

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from time import strftime

HERE = Path(__file__).parent / "simulator"
NAMES = ("playing", "scoring")


def main() -> None:
    """Measure the given parts; print tables or JSON, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=NAMES, help="one part")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--out", type=Path, help=f"where to write them (all: {HERE.name}/)")
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    from parts import PARTS

    document: dict[str, object] = {
        "date": strftime("%Y-%m-%d %H:%M"),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    for name in [arguments.only] if arguments.only else NAMES:
        found, lines = PARTS[name]()
        document[name] = [asdict(row) for row in found]
        if not arguments.json:
            print("\n".join([*lines, ""]), flush=True)
    text = json.dumps(document, indent=1) + "\n"
    if arguments.json:
        print(json.dumps(document))
    out = arguments.out or (None if arguments.only else HERE / "results.json")
    if out:
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
