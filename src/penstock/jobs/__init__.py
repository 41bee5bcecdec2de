"""Training jobs: their settings, their files, and the program that trains them."""

__all__ = ["DEFAULT_JOB", "JOBS", "SEVERAL_GPUS"]

JOBS: dict[str, str] = {
    "gpt-text": "penstock.examples.gpt_text:job",
    "digits": "penstock.examples.digits:job",
    "resnet-digits": "penstock.examples.resnet_digits:job",
}

DEFAULT_JOB = "gpt-text"

SEVERAL_GPUS = (
    "several ranks on one GPU were tried on an H100; a GPU for each rank was tried on a stand-in "
    "for GPUs only, and NCCL itself never"
)
"""What to say before several ranks run on GPUs."""
