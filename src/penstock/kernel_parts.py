"""How numba compiles kernels and what they call: each function once for each types, into kernels.

Left to itself numba optimises every function with all that it calls, makes machine code of it and
loads that, though the code of a helper only ever runs as a part of a kernel, which is optimised
as a whole again: more than half of the time of a first plan. It also asks anew at every ``+`` what
the sum of two numbers is, and looks for closures and sums of whole arrays where there are none.
"""

# numba has no types: what it makes is unknown to a strict checker.
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
    """Code of a kernel, optimised once: numba does so thrice, for code that counts references."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class LinkedCode(Whole):
    """Code that is linked into kernels as it was written, neither optimised nor loaded."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """No address: nothing calls it from outside."""
        return 0

    @property
    def codegen(self) -> Any:
        """Where Python's objects would be handed to code that has an address."""
        return NoObjects


class NoObjects:
    """Takes what compiled code that never meets Python's objects would read of them."""

    @staticmethod
    def set_env(env_name: str, env: Any) -> None:
        """Nothing to do."""


class KernelCompiler(Compiler):
    """Numba's compiler without the steps that kernels do not need."""

    library: type[JITCodeLibrary] = Whole

    def define_pipelines(self) -> Any:
        """Numba's own steps, but for those that look for closures and sums of whole arrays."""
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
    """The same for what is to be a part of kernels."""

    library = LinkedCode


@contextmanager
def remembered_types(context: Any) -> Generator[None]:
    """Let numba find out once what a function of its own makes of some types."""
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
    """Let a function be compiled for whole numbers, not for 0, for 1 and for -1 again."""
    find = dispatcher.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        plain = {name: unliteral(kind) for name, kind in kws.items()}
        return find(tuple(map(unliteral, args)), plain)

    dispatcher.get_call_template = get_call_template
