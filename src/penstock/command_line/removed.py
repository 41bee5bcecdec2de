"""Options that commands had once, each with what to use instead."""

__all__ = ["REMOVED_OPTIONS"]

REMOVED_OPTIONS = {
    "--allow-pickle": "checkpoints of format 1 are not read any more: resume with the version that "
    "wrote them, and save the weights with --save-weights",
}
