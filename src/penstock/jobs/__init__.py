"""Training jobs: their settings, their files, and the program that trains them."""

__all__ = ["DEFAULT_JOB", "JOBS", "SEVERAL_GPUS"]

JOBS: dict[str, str] = {
    "gpt-text": "penstock.examples.gpt_text:job",
    "digits": "penstock.examples.digits:job",
    "resnet-digits": "penstock.examples.resnet_digits:job",
}

DEFAULT_JOB = "gpt-text"

SEVERAL_GPUS = "no run on several GPUs works yet"
