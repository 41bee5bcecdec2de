"""The secret of a run: what ranks write for one another carries a tag that only they can make.

`launch_workers` gives its workers a new secret. Under torchrun the user may set one, in
``PENSTOCK_SECRET`` or in a file that ``PENSTOCK_SECRET_FILE`` names. Without a secret the tags are
checksums, which anybody can make.
"""

import hmac
import os
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from penstock.errors import BadInput

__all__ = ["SECRET", "TAG_BYTES", "run_key", "tag_of", "tags_match"]

SECRET = "PENSTOCK_SECRET"
SECRET_FILE = "PENSTOCK_SECRET_FILE"
TAG_BYTES = 16


def run_key() -> bytes:
    """The key of this run's tags; empty if there is no secret.

    Raises:
        BadInput: the file with the secret cannot be read.
    """
    return key_of(os.environ.get(SECRET, ""), os.environ.get(SECRET_FILE, ""))


@cache
def key_of(secret: str, file: str) -> bytes:
    """The key that belongs to a secret, or to the one in a file."""
    if not secret and file:
        try:
            secret = Path(file).read_text().strip()
        except (OSError, ValueError) as cause:
            raise BadInput(
                f"{SECRET_FILE} is '{file}', which cannot be read ({cause}); give every rank a "
                f"file with the same secret"
            ) from cause
    return blake2b(secret.encode()).digest() if secret else b""


def tag_of(data: Any, place: str = "") -> bytes:
    """The tag of ``data`` (bytes or a buffer of them), written at ``place``."""
    digest = blake2b(place.encode() + b"\0", key=run_key(), digest_size=TAG_BYTES)
    digest.update(data)
    return digest.digest()


def tags_match(one: bytes, other: bytes) -> bool:
    """Whether two tags are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(one, other)
