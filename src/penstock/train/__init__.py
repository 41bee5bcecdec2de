"""Training jobs: their settings, their files, and the program that trains them."""

__all__ = ["DEFAULT_JOB", "JOBS", "SEVERAL_GPUS"]

JOBS = ("gpt-text", "digits", "resnet-digits")
"""The built-in jobs; the file of each is ``examples/NAME.toml``."""

DEFAULT_JOB = "gpt-text"

SEVERAL_GPUS = (
    "several ranks on one GPU were tried on an H100; a GPU for each rank was tried on mock "
    "GPUs only, and NCCL itself never"
)
"""The note before several ranks run on GPUs."""
