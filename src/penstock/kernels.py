"""Compiles inner loops to machine code, with numba.

A kernel is a plain function on numbers, arrays and named tuples of arrays. Its helpers are plain
functions too, found by name in its module. Only the call

    from penstock.kernels import compiled

    seconds = compiled(play_to_the_end)(whole, real)

requests compilation. Numba compiles the kernel when it is first called, and runs it without
Python's lock. The plain function is unchanged, so a test may run either.

Machine code is kept on disk. Its key is made from the byte code of the kernel, of all that it calls
and of the constants that they read, so the loaded code always corresponds to the sources. It is in
``kernels`` of ``PENSTOCK_CACHE_DIR``, or of the user's cache directory. If that cannot be written,
every process compiles for itself. A few recently used keys are kept for each kernel.
"""

# numba has no type annotations, so a strict checker cannot know its results.
# pyright: basic

import os
import pickle
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from tempfile import NamedTemporaryFile
from types import CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar, cast

__all__ = [
    "KeptCode",
    "cache_directory",
    "compiled",
    "copy_into",
    "fingerprint",
    "is_on_disk",
    "when_compiling",
]

P = ParamSpec("P")
R = TypeVar("R")

KEYS_KEPT = 4
"""How many versions of each kernel stay on disk, for several checkouts used in turn."""

NEWEST_WITH_PARTS = (0, 68)
"""The newest numba whose internals `penstock.kernel_parts` and `start_runtime` are known to fit.
With newer versions numba's own pipeline compiles helpers, which takes twice as long."""

kernels: dict[FunctionType, Any] = {}
helpers: dict[FunctionType, Any] = {}
listeners: list[Callable[[str], None]] = []


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` as machine code, compiled or read from disk when it is first called."""
    kernel = kernels.get(cast("FunctionType", function))
    return kernel or kernels.setdefault(function, made(cast("FunctionType", function)))


def is_on_disk(function: Callable[..., Any]) -> bool:
    """Whether machine code of the current ``function`` is on disk, for any argument types."""
    return KeptCode(function).directory.is_dir()


def when_compiling(listener: Callable[[str], None]) -> None:
    """Call ``listener`` with a kernel's name whenever one is compiled, which takes seconds."""
    listeners.append(listener)


def cache_directory() -> Path:
    """Where machine code is kept between processes."""
    chosen = os.environ.get("PENSTOCK_CACHE_DIR")
    if chosen:
        return Path(chosen) / "kernels"
    place = os.environ.get("XDG_CACHE_HOME")
    return (Path(place) if place else Path.home() / ".cache") / "penstock" / "kernels"


def copy_into(target: Any, source: Any) -> None:
    """``target[:] = source`` for compiled code.

    The assignment itself can raise an error that formats shapes, which takes a second to compile.
    """
    for i in range(len(source)):
        target[i] = source[i]


def made(function: FunctionType) -> Any:
    """A kernel that numba compiles when it is called."""
    import numba

    options: dict[str, Any] = {"nogil": True, "no_cfunc_wrapper": True}
    if numba.version_info[:2] <= NEWEST_WITH_PARTS:
        from penstock.kernel_parts import KernelCompiler

        options["pipeline_class"] = KernelCompiler
    kernel: Any = numba.njit(**options)(with_helpers(function))
    kernel._cache = KeptCode(function)
    return kernel


def helper(function: FunctionType) -> Any:
    """Compile a function that only kernels call, so without an entry point for Python."""
    import numba

    if function not in helpers:
        plain = with_helpers(function)
        options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        if numba.version_info[:2] > NEWEST_WITH_PARTS:
            helpers[function] = numba.njit(**options)(plain)
            return helpers[function]
        from penstock.kernel_parts import PartCompiler, forget_literals

        helpers[function] = numba.njit(pipeline_class=PartCompiler, **options)(plain)
        forget_literals(helpers[function])
    return helpers[function]


def with_helpers(function: FunctionType) -> FunctionType:
    """A copy of ``function`` that calls compiled functions instead of plain ones."""
    names = dict(function.__globals__)
    for name, value in names_read(function):
        if isinstance(value, FunctionType) and are_together(value, function):
            names[name] = helper(value)
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def are_together(one: Any, other: Any) -> bool:
    """Whether ``one`` is in the same package as ``other``, or in this one.

    The key of a kernel contains the code of such functions. Of other packages it contains the
    version.
    """
    packages = {other.__module__.partition(".")[0], __name__.partition(".")[0]}
    return one.__module__.partition(".")[0] in packages


def names_read(function: FunctionType) -> list[tuple[str, Any]]:
    """The global names that a function may read, with their values."""
    known = function.__globals__
    return [(name, known[name]) for name in sorted(names_in(function.__code__)) if name in known]


def names_in(code: CodeType) -> set[str]:
    """All names in the code of a function and of functions inside it."""
    inner = [names_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inner)


def fingerprint(function: Callable[..., Any]) -> str:
    """A hash that changes with a function's code, and with that of all it calls and reads."""
    import llvmlite
    import numba
    import numpy

    parts: dict[Any, str] = {}
    describe_function(cast("FunctionType", function), parts)
    versions = (sys.version_info[:2], numba.__version__, llvmlite.__version__, numpy.__version__)
    return sha256(repr((versions, *parts.values())).encode()).hexdigest()[:24]


def describe_function(function: FunctionType, parts: dict[Any, str]) -> None:
    """Add a function and what it reads to ``parts``, each once."""
    if function in parts:
        return
    parts[function] = ""  # stands for itself while what it calls is described
    defaults = (function.__defaults__, function.__kwdefaults__)
    read = [(name, describe(value, function, parts)) for name, value in names_read(function)]
    cells = [describe(c.cell_contents, function, parts) for c in function.__closure__ or ()]
    # Kept code names the modules of its parts, so that of one that has moved cannot be read.
    place = (function.__module__, function.__qualname__)
    parts[function] = repr((place, code_text(function.__code__), defaults, read))
    parts[function] += repr(cells)


def code_text(code: CodeType) -> str:
    """The code of a function as text, without its position in the file."""
    constants = [
        code_text(part)
        if isinstance(part, CodeType)
        else repr(sorted(map(repr, part)) if isinstance(part, frozenset) else part)
        for part in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))


def describe(value: Any, reader: FunctionType, parts: dict[Any, str]) -> str:
    """The value of a name as text that is equal in every process."""
    if isinstance(value, FunctionType) and are_together(value, reader):
        describe_function(value, parts)
        return value.__qualname__
    if isinstance(value, ModuleType) and value.__name__.startswith(module_root(reader)):
        known = {n: v for n, v in vars(value).items() if n in names_in(reader.__code__)}
        return repr([(n, describe(v, reader, parts)) for n, v in sorted(known.items())])
    if isinstance(value, bool | int | float | str | bytes | tuple | None):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__} {getattr(value, '_fields', ())}"
    definition = getattr(value, "_defn", None)  # of an intrinsic, which writes its own code
    if isinstance(definition, FunctionType):
        return describe(definition, reader, parts)
    return getattr(value, "__name__", type(value).__qualname__)


def module_root(function: FunctionType) -> str:
    """The package that contains a function."""
    return function.__module__.partition(".")[0]


class KeptCode:
    """The machine code of one kernel on disk, with the interface of numba's caches.

    There is one file for each key, argument types and processor. It is written under another name
    and then renamed. Processes that write the same file write the same content.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        function = cast("FunctionType", function)
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.directory = cache_directory() / self.name / fingerprint(function)

    @property
    def cache_path(self) -> str:
        """The directory of the files."""
        return str(self.directory)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The code compiled for these arguments; if there is none, call listeners, return None."""
        from numba.core.compiler import CompileResult

        start_runtime(target)
        try:
            parts = pickle.loads(self.file_of(signature, target.codegen()).read_bytes())
            os.utime(self.directory)
        except (OSError, EOFError, pickle.UnpicklingError, ImportError, AttributeError):
            # Without it, damaged, or of types that have moved since.
            for listener in listeners:
                listener(self.name)
            return None
        return CompileResult._rebuild(target, *parts)

    def save_overload(self, signature: Any, result: Any) -> None:
        """Write compiled code, and remove code that was not used for long."""
        from numba.core.serialize import dumps

        path = self.file_of(signature, result.codegen)
        content = dumps(result._reduce())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(content)
            os.replace(file.name, path)
            self.forget_old_keys()
        except OSError:
            return  # read-only, full, or tidied by another process: the next one compiles again

    def file_of(self, signature: Any, codegen: Any) -> Path:
        """The file for some types of arguments on this processor."""
        types = tuple(type_text(one) for one in signature)
        text = repr((types, codegen.magic_tuple()))
        return self.directory / f"{sha256(text.encode()).hexdigest()[:24]}.code"

    def forget_old_keys(self) -> None:
        """Remove the directories of this kernel that were used longest ago."""
        keys = sorted(self.directory.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in keys[:-KEYS_KEPT]:
            rmtree(old, ignore_errors=True)


def start_runtime(target: Any) -> None:
    """Prepare numba for loaded code.

    Such code only calls numba's runtime. The compiler's own tables, which numba loads here by
    default, take 0.06 s; they are loaded when something is compiled.
    """
    import numba
    from numba.core.runtime.nrt import rtsys

    if numba.version_info[:2] > NEWEST_WITH_PARTS:
        target.refresh()
    else:
        rtsys.initialize(target)


def type_text(kind: Any) -> str:
    """A type of numba as text; with the field names of named tuples, since code uses positions."""
    inner = getattr(kind, "types", None)
    if inner is None:
        return str(kind)
    return f"{kind} {getattr(kind, 'fields', ())} {[type_text(one) for one in inner]}"
