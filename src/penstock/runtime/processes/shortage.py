"""Says which limit of the machine or of this process was reached, and how to raise it."""

import errno
import os
import resource
import shutil

__all__ = ["shortage_words"]

SHARED_MEMORY = "/dev/shm"

ENOUGH_BYTES = 1 << 30
"""With so much free, shared memory is not the disk that is full."""


def shortage_words(cause: BaseException) -> str:
    """What ran out, its limit and the remedy; empty for other errors.

    >>> shortage_words(ValueError("no number"))
    ''
    """
    if not isinstance(cause, OSError):
        return ""
    match cause.errno:
        case errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"this process may have {limit} open files, and needs more; allow them with "
                f"'ulimit -n {max(1024, 4 * limit)}'"
            )
        case errno.ENFILE:
            return "the machine has as many open files as it allows; close programs"
        case errno.EAGAIN:
            limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
            return (
                f"this user may have {limit} processes and threads; allow more with 'ulimit -u', "
                f"or use fewer workers"
            )
        case errno.ENOSPC if cause.filename is None and os.path.isdir(SHARED_MEMORY):
            room = shutil.disk_usage(SHARED_MEMORY)
            if room.free > ENOUGH_BYTES:
                return "a disk is full; delete files, or write to another one"
            return (
                f"a disk is full: {SHARED_MEMORY} has {room.free >> 10} KiB free of "
                f"{room.total >> 10} KiB; delete files there that no process uses, or make it "
                f"larger"
            )
        case _:
            return ""
