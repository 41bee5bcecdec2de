"""Every private interface of torch that Penstock uses, each with its reason.

Torch may change them in any version. No other file names one, and a test sees to it. All of them
are the same in the oldest torch that is supported (2.11) and in 2.13.
"""

import contextlib
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules._functions import BackwardHookFunction
from torch.optim._muon import _adjust_lr as muon_rate
from torch.optim._muon import _zeropower_via_newtonschulz as muon_direction
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "BACKWARD_HOOKS",
    "BACKWARD_PRE_HOOKS",
    "COMPILED_CALL",
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "GROUPED_PRODUCT",
    "HOOKS",
    "BackwardHookFunction",
    "BatchNorm",
    "FakeTensor",
    "FakeTensorMode",
    "NoFunctionCalls",
    "NoSubclassCalls",
    "Norm",
    "TorchDispatchMode",
    "allocation_event",
    "as_parameter",
    "as_subclass",
    "checkpoint_here",
    "compiler",
    "default_store",
    "eagerly",
    "flat_weights",
    "forget_groups",
    "forward_hooks",
    "function_modes",
    "gradient_hooks",
    "has_backward_hooks",
    "has_global_hooks",
    "holder_of",
    "muon_direction",
    "muon_rate",
    "own_buffers",
    "own_parameters",
    "pop_function_mode",
    "processes_of",
    "push_function_mode",
    "pytree",
    "run_engine",
    "storage_id",
    "without_modes",
    "write_count",
]

# Imported above:
#   pytree                arguments of any structure, with the path of each leaf
#   TorchDispatchMode     the operators below autograd, to count and time them
#   FakeTensor            tensors without values on a device that has autocast, as meta has not
#   BackwardHookFunction  torch's own call around a module with hooks, which is not the user's
#   muon_*                the parts of a step of Muon, to predict the next one

internals: Any = torch._C  # its stubs do not name all of it
overrides: Any = torch.overrides
autograd: Any = internals._autograd
engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)

# Calls of our own are not the user's: no function mode sees them, or no tensor subclass.
NoFunctionCalls = torch._C.DisableTorchFunction
NoSubclassCalls = torch._C.DisableTorchFunctionSubclass

# Below all function modes of the user there is one of a stage.
function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
push_function_mode: Callable[[Any], None] = overrides._push_mode
pop_function_mode: Callable[[], Any] = overrides._pop_mode

run_engine: Callable[..., Any] | None = getattr(engine, "run_backward", None)
"""A backward 13 microseconds faster than `torch.autograd`, which is used where this is None."""

# Tensors.

write_count: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""A number that every write to a tensor changes; how a call writes is told nowhere else."""

gradient_hooks = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""The hooks on a tensor's gradient and on its accumulation, each a dict or None."""

as_subclass: Callable[[type, torch.Tensor], Any] = torch.Tensor._make_subclass
"""A tensor as one of another class, without history; the public way makes a view of it."""


def as_parameter(tensor: Any) -> Any:
    """Make a tensor of a subclass an instance of `torch.nn.Parameter`, too."""
    tensor._is_param = True
    return tensor


def storage_id(tensor: torch.Tensor) -> int:
    """What tells storages apart, also those without memory, whose addresses are all 0."""
    return tensor.untyped_storage()._cdata


# Modules. Their dicts are read and written where `setattr` would check and register.

BACKWARD_HOOKS, BACKWARD_PRE_HOOKS = "_backward_hooks", "_backward_pre_hooks"
"""Where a module's ``__dict__`` has them: a stage takes them off what it leaves out."""

HOOKS = "_hooks"
"""How the names of all attributes of modules end that hold hooks."""

COMPILED_CALL = "_compiled_call_impl"
"""Where a module's ``__dict__`` has what ``module.compile()`` made: it passes by ``forward``."""

# All normalisations over the batch, also those that users derive; and those over one sample.
BatchNorm = nn.modules.batchnorm._BatchNorm
Norm = nn.modules.batchnorm._NormBase


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The dict of the parameters that a module itself holds."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """The dict of the buffers that a module itself holds."""
    return module._buffers


def holder_of(module: nn.Module, name: str) -> dict[str, Any]:
    """The dict in which a module holds its own parameter or buffer of this name."""
    return own_parameters(module) if name in module._parameters else own_buffers(module)


def flat_weights(module: nn.Module) -> tuple[list[Any], list[str]]:
    """The second list of its weights that a recurrent module computes with, and their names."""
    return getattr(module, "_flat_weights", []), getattr(module, "_flat_weights_names", [])


def forward_hooks(module: nn.Module) -> int:
    """How many hooks there are around a module's forward."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether there are hooks on a module's backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_global_hooks() -> bool:
    """Whether there are backward hooks for all modules."""
    registered = nn.modules.module
    return bool(registered._global_backward_hooks or registered._global_backward_pre_hooks)


# What runs now.


def checkpoint_here() -> Any:
    """The innermost checkpoint (torch.utils.checkpoint) that is running, as an object; or None."""
    found = autograd._top_saved_tensors_default_hooks(False)
    if found is None or not getattr(found[0], "__qualname__", "").startswith("_checkpoint_hook"):
        return None
    return found[0]


NO_CONTEXT = contextlib.nullcontext()


def without_modes() -> Any:
    """Within, no dispatch mode is active: those of an estimate see only what is here."""
    return _disable_current_modes() if internals._len_torch_dispatch_stack() else NO_CONTEXT


def compiler() -> Any:
    """Torch's compiler, of which some settings and all counters are private; imported late: 2 s."""
    import torch._dynamo.utils

    return torch._dynamo


def eagerly() -> contextlib.AbstractContextManager[object]:
    """Within, compiled functions run as they are written; the compiler is not imported for it."""
    if "torch._dynamo" not in sys.modules:
        return NO_CONTEXT
    return torch.compiler.set_stance("force_eager")


# Operators whose cost is counted, and which have no other name.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
GROUPED_PRODUCT = torch.ops.aten._grouped_mm


def allocation_event() -> Any:
    """What torch's profiler, which alone sees allocations of the CPU, calls one of them.

    Raises:
        AttributeError: torch has it no more; then the memory in use is unknown.
    """
    return internals._profiler._EventType.Allocation


# Processes.


def default_store() -> Any:
    """The store of the default process group, which the user may have made."""
    return torch.distributed.distributed_c10d._get_default_store()


def processes_of(context: Any) -> Any:
    """The processes behind a context of `start_processes`, whose waiting times are fixed."""
    return context._pc


def forget_groups(mesh: Any) -> None:
    """Let a device mesh refer to no process group, so that their connections are closed."""
    getattr(mesh, "_pg_registry", dict[str, object]()).clear()
