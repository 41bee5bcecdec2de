"""The built-in jobs: names, and where the functions are that return them."""

__all__ = ["DEFAULT_JOB", "JOBS"]

JOBS: dict[str, str] = {
    "gpt-text": "penstock.examples.gpt_text:job",
    "digits": "penstock.examples.digits:job",
    "resnet-digits": "penstock.examples.resnet_digits:job",
}

DEFAULT_JOB = "gpt-text"
