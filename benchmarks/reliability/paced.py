"""Runs a script in which a training step takes longer, so that there is time to disturb it.

torchrun --nproc-per-node 4 benchmarks/reliability/paced.py SECONDS SCRIPT [ARGUMENT ...]
"""

import runpy
import sys
import time

from penstock.runtime.pipeline import Pipeline

pause_s, script = float(sys.argv[1]), sys.argv[2]
step = Pipeline.step


def paced(self, *batches):
    """A step after a pause."""
    time.sleep(pause_s)
    return step(self, *batches)


Pipeline.step = paced
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
