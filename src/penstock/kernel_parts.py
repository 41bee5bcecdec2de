"""How numba compiles what kernels call: once for each types, and into the kernels alone.

Left to itself numba optimises every function with all that it calls, makes machine code of it and
loads that, though the code of a helper only ever runs as a part of a kernel, which is optimised
as a whole again: more than half of the time of a first plan.
"""

# numba has no types: what it makes is unknown to a strict checker.
# pyright: basic

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.types import unliteral

__all__ = ["PartCompiler", "forget_literals"]


class PartCompiler(Compiler):
    """Numba's compiler, whose code is to be a part of kernels."""

    def define_pipelines(self) -> Any:
        """Numba's own steps, which put the code where they are told."""
        codegen = self.state.targetctx.codegen()
        self.state.library = Part(codegen, self.state.func_id.func_qualname)
        return super().define_pipelines()


class Part(JITCodeLibrary):
    """Code that is linked into kernels as it was written, neither optimised nor loaded."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

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


def forget_literals(dispatcher: Any) -> None:
    """Let a function be compiled for whole numbers, not for 0, for 1 and for -1 again."""
    find = dispatcher.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        plain = {name: unliteral(kind) for name, kind in kws.items()}
        return find(tuple(map(unliteral, args)), plain)

    dispatcher.get_call_template = get_call_template
