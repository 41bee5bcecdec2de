"""Builds the package: scikit-build-core, on machines with and without a C++ compiler.

Where there is no compiler that knows C++20, zig's from the package registry compiles the core. An
editable installation has the compiled core in the source tree, so that `PYTHONPATH=src` finds it
too. For that alone, without an installation: ``python build_backend/penstock_build.py``.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from platform import machine
from shutil import which
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

if __name__ != "__main__":
    from scikit_build_core import build
    from scikit_build_core.build import *  # noqa: F403

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

Config = dict[str, Any] | None
"""The settings of a front end such as pip."""

PROBE = "#include <algorithm>\n#include <ranges>\n#include <span>\nint main() {}\n"


def get_requires_for_build_wheel(config_settings: Config = None) -> list[str]:
    """What scikit-build-core needs, and zig where no compiler is found."""
    check_headers()
    zig = [] if compiler() else ["ziglang"]
    return [*build.get_requires_for_build_wheel(config_settings), *zig]


def get_requires_for_build_editable(config_settings: Config = None) -> list[str]:
    """The same as for a wheel."""
    return get_requires_for_build_wheel(config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Config = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel with the machine's compiler, or zig's."""
    check_headers()
    with tempfile.TemporaryDirectory(prefix="penstock-zig-") as folder:
        found = compiler()
        os.environ |= {"CXX": found} if found else zig(Path(folder))
        return build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Config = None, metadata_directory: str | None = None
) -> str:
    """Build the core into the source tree, and a wheel that only leads there."""
    with tempfile.TemporaryDirectory(prefix="penstock-wheel-") as folder:
        name = build_wheel(folder, config_settings, metadata_directory)
        with ZipFile(Path(folder) / name) as whole:
            return lead_to_source(whole, Path(wheel_directory) / name)


def lead_to_source(whole: ZipFile, target: Path) -> str:
    """Put the core of a wheel into the source tree; write a wheel of its metadata and the path."""
    with ZipFile(target, "w", ZIP_DEFLATED) as leading:
        for name in whole.namelist():
            if name.endswith(".so"):
                # Not over the old file: a running process may have it mapped.
                (SOURCE / f"{name}.new").write_bytes(whole.read(name))
                (SOURCE / f"{name}.new").rename(SOURCE / name)
            elif ".dist-info/" in name and not name.endswith("/RECORD"):
                leading.writestr(name, whole.read(name))
            elif name.endswith("/RECORD"):
                record = name
        leading.writestr("penstock.pth", f"{SOURCE}\n")
        names = [*leading.namelist(), record]
        leading.writestr(record, "".join(f"{name},,\n" for name in names))
    return target.name


def check_headers() -> None:
    """End with one sentence if Python's headers are missing."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        minor = f"{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(
            f"penstock has a compiled core and {header} is missing; install Python's headers, "
            f"on Debian and Ubuntu python{minor}-dev, on Fedora python3-devel, and try again"
        )


def compiler() -> str:
    """The compiler that the environment names, or one that knows C++20; empty if there is none."""
    named = os.environ.get("CXX", "")
    return named or next(filter(knows_cpp_20, ("c++", "g++", "clang++")), "")


def knows_cpp_20(name: str) -> bool:
    """Whether a compiler is there and can read a small program."""
    command = (name, "-std=c++20", "-fsyntax-only", "-x", "c++", "-")
    if not which(name):
        return False
    return subprocess.run(command, input=PROBE.encode(), capture_output=True).returncode == 0


def zig(folder: Path) -> dict[str, str]:
    """Variables with which CMake finds zig's tools, each of which must be one word.

    With a target, zig compiles for any machine of its kind; without, for this very processor and
    this C library. Its own libraries are compiled once more for each build, and leave nothing.
    """
    print("no C++20 compiler found; zig's from the package registry builds", file=sys.stderr)
    found = find_spec("ziglang")
    if not found or not found.origin:
        sys.exit("penstock has a compiled core: install a C++ compiler, or 'pip install ziglang'")
    program = Path(found.origin).with_name("zig")
    target = sysconfig.get_config_var("MULTIARCH") or f"{machine()}-linux-gnu"
    target += ".2.17" if target.endswith("-gnu") else ""
    words = {
        "CC": f"cc -target {target}",
        "CXX": f"c++ -target {target}",
        "AR": "ar",
        "RANLIB": "ranlib",
    }
    for name, command in words.items():
        tool = folder / name.lower()
        tool.write_text(f'#!/bin/sh\nexec "{program}" {command} "$@"\n')
        tool.chmod(0o755)
    cache = {f"ZIG_{kind}_CACHE_DIR": str(folder / "cache") for kind in ("GLOBAL", "LOCAL")}
    return cache | {name: str(folder / name.lower()) for name in words}


def build_in_place() -> None:
    """Build the core into the source tree, and install nothing."""
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder)
        sys.exit(subprocess.run((*pip, "--editable", str(ROOT)), check=False).returncode)


if __name__ == "__main__":
    build_in_place()
