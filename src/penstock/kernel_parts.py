"""Makes numba compile kernels and their helpers faster: each function once for its types.

By default numba optimises every function with all that it calls, generates machine code and loads
it. But the code of a helper runs only as a part of a kernel, which is optimised as a whole again:
that took more than half of the time of a first plan. Numba also resolves the result type at every
``+``, and looks for closures and sums of whole arrays where there are none.
"""

# numba has no type annotations, so a strict checker cannot know its results.
# pyright: basic

from collections.abc import Generator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.typed_passes import InlineOverloads, NopythonRewrites
from numba.core.types import Function, unliteral
from numba.core.untyped_passes import InlineClosureLikes

__all__ = ["KernelCompiler", "PartCompiler", "forget_literals"]


class Whole(JITCodeLibrary):
    """Code of a kernel, optimised once: numba does so three times, for reference counting."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class LinkedCode(Whole):
    """Code that is only linked into kernels, so it is neither optimised nor loaded."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """No address: only kernels call it."""
        return 0

    @property
    def codegen(self) -> Any:
        """The object that would pass Python objects to code with an address."""
        return NoObjects


class NoObjects:
    """Ignores the environment that numba sets, since this code never uses Python objects."""

    @staticmethod
    def set_env(env_name: str, env: Any) -> None:
        """Nothing to do."""


class KernelCompiler(Compiler):
    """Numba's compiler without the steps that kernels do not need."""

    library: type[JITCodeLibrary] = Whole

    def define_pipelines(self) -> Any:
        """Numba's steps, except those that look for closures and sums of whole arrays."""
        needless = [InlineOverloads, NopythonRewrites]
        if not any(isinstance(part, CodeType) for part in self.state.func_id.code.co_consts):
            needless.append(InlineClosureLikes)
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes[:] = [step for step in pipeline.passes if step[0] not in needless]
        return pipelines

    def _compile_core(self) -> Any:
        codegen = self.state.targetctx.codegen()
        self.state.library = self.library(codegen, self.state.func_id.func_qualname)
        self.state.library.enable_object_caching()
        with remembered_types(self.state.typingctx):
            return super()._compile_core()


class PartCompiler(KernelCompiler):
    """The same for helpers, which become part of kernels."""

    library = LinkedCode


@contextmanager
def remembered_types(context: Any) -> Generator[None]:
    """Within, cache the result types that numba's own functions have for given argument types."""
    if "resolve_function_type" in vars(context):  # what a kernel calls, compiled within it
        yield
        return
    known: dict[Any, Any] = {}
    resolve = context.resolve_function_type

    def resolve_once(function: Any, args: Any, kws: Any) -> Any:
        if kws or not isinstance(function, Function):
            return resolve(function, args, kws)
        key = (function, tuple(args))
        found = known.get(key)
        if found is None:
            found = known[key] = resolve(function, args, kws)
        return found

    context.resolve_function_type = resolve_once
    try:
        yield
    finally:
        del context.resolve_function_type


def forget_literals(dispatcher: Any) -> None:
    """Make numba compile a function for integers, not separately for the literals 0, 1 and -1."""
    find = dispatcher.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        plain = {name: unliteral(kind) for name, kind in kws.items()}
        return find(tuple(map(unliteral, args)), plain)

    dispatcher.get_call_template = get_call_template
