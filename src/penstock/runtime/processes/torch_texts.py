"""The texts by which errors of torch are told apart, for which torch has no types or attributes.

Gloo raises a plain `RuntimeError` for everything. All such texts are here, and a test provokes each
of these errors.
"""

__all__ = ["connection_is_lost", "has_timed_out", "link_is_cut"]


def has_timed_out(failure: BaseException) -> bool:
    """Whether an operation of a process group ended because its time limit was over."""
    return "imed out" in str(failure) or "imeout" in str(failure)


def connection_is_lost(failure: BaseException) -> bool:
    """Whether an operation of a Gloo group ended because another rank has left the group."""
    return "gloo/transport/tcp" in str(failure) and not has_timed_out(failure)


def link_is_cut(failure: BaseException) -> bool:
    """Whether a store's host is silent; otherwise the process that serves the store has ended."""
    return "timed out" in str(failure)
