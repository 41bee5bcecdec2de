"""Where the tests of GPUs run: on a GPU, or on the CPU, which shows that their code holds.

pytest -m cuda
PENSTOCK_TEST_DEVICE=cpu pytest -m cuda
"""

import os

DEVICE = os.environ.get("PENSTOCK_TEST_DEVICE", "cuda")
