"""The compiled core: what must be fast, in C++, with a typed stub (`native.pyi`).

It is built when the package is installed. Nothing is compiled later.
"""

from hashlib import sha256
from pathlib import Path

import penstock
from penstock.errors import BadInput

__all__ = ["check_core", "digest_of_sources"]

FOLDER = Path(__file__).parent

REMEDY = "run: pip install -e . (or, without installing, python build_backend/penstock_build.py)"


def digest_of_sources(folder: Path) -> str:
    """A digest of the C++ files of a folder; empty if it has none, as in an installed package."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".hpp"))
    parts = (sha256(path.read_bytes()).hexdigest() for path in files)
    return sha256("".join(parts).encode()).hexdigest() if files else ""


def check_core(version: str, sources: str, folder: Path = FOLDER) -> None:
    """Raise `BadInput` if a core was built for another version or from other C++ files."""
    if version != penstock.__version__:
        raise BadInput(
            f"the compiled core is of version {version} and the package of version "
            f"{penstock.__version__}; install the package again"
        )
    if digest_of_sources(folder) not in ("", sources):
        raise BadInput(f"the compiled core was built from other C++ files than {folder}; {REMEDY}")


try:
    from penstock.core import native
except ImportError as error:
    raise BadInput(f"the compiled core cannot be loaded ({error}); {REMEDY}") from error
check_core(native.version, native.sources)
