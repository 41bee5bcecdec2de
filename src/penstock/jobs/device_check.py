"""Whether layers can run where ``--device`` says, before anything is built or measured."""

from penstock.errors import BadInput

__all__ = ["SEVERAL_GPUS", "check_device"]

SEVERAL_GPUS = "no run on several GPUs works yet"


def check_device(device: str, workers: int = 1) -> None:
    """Raise `BadInput` unless ``workers`` workers can run on ``device`` here."""
    if device == "cpu":
        return
    import torch  # here, since 'penstock launch' asks for a constant only

    if workers > 1:
        raise BadInput(
            f"--device {device} with {workers} workers: {SEVERAL_GPUS}; use one GPU (--workers 1), "
            f"or leave --device out and run on CPUs"
        )
    if not torch.cuda.is_available():
        raise BadInput(
            f"--device {device}: torch {torch.__version__} finds no CUDA device here; leave "
            f"--device out, or plan for a GPU with 'penstock profile --estimate KIND'"
        )
