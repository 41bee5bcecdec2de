"""The built-in jobs by name, each as the place of the function that returns it."""

__all__ = ["DEFAULT_JOB", "JOBS"]

JOBS: dict[str, str] = {
    "gpt-text": "penstock.examples.gpt_text:job",
    "digits": "penstock.examples.digits:job",
}

DEFAULT_JOB = "gpt-text"
