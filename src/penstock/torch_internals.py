"""Every private interface of torch that Penstock uses, each with its reason.

Torch may change them in any version. No other file names one, and a test sees to it. All of them
are the same in the oldest torch that is supported (2.11) and in 2.13.
"""

import contextlib
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # meta has no autocast
from torch.library import _scoped_library as kernels_for_now  # others are forever
from torch.nn.modules._functions import BackwardHookFunction  # torch's, and no call of the user's
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE  # a name in state dicts
from torch.optim._muon import _adjust_lr as muon_rate  # two parts of a step, to predict the next
from torch.optim._muon import _zeropower_via_newtonschulz as muon_direction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # arguments of any structure, with paths of leaves
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees operators, to count and time them
    _disable_current_modes,
)

internals: Any = torch._C  # its stubs do not name all of it
overrides: Any = torch.overrides
autograd: Any = internals._autograd
engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)

NoFunctionCalls = torch._C.DisableTorchFunction  # calls of our own, which are not the user's

run_engine: Callable[..., Any] | None = getattr(engine, "run_backward", None)
"""A backward 13 microseconds faster than `torch.autograd`, which is used where this is None."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a structure, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def after_backward(act: Callable[[], None]) -> None:
    """Call ``act`` when the backward that runs now has ended."""
    engine.queue_callback(act)


# Tensors.

write_count: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""A number that every write to a tensor changes; a call's writes are recorded nowhere else."""

schema_of = operator.attrgetter("_schema")
"""The arguments of one overload of an operator, and what it makes."""

gradient_hooks = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""The hooks on a tensor's gradient and on its accumulation, each a dict or None."""

as_subclass: Callable[[type, torch.Tensor], Any] = torch.Tensor._make_subclass
"""A tensor as one of another class, without history; the public way makes a view of it."""


def as_parameter(tensor: Any) -> Any:
    """Make a tensor of a subclass an instance of `torch.nn.Parameter`, too."""
    tensor._is_param = True
    return tensor


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of a storage, also of those without memory, whose addresses are all 0."""
    return tensor.untyped_storage()._cdata


def has_other_users(tensor: torch.Tensor) -> bool:
    """Return whether other tensors share the memory; a detached tensor does not record its base."""
    return internals._storage_Use_Count(storage_id(tensor)) > OWN_USES


OWN_USES = 2
"""Users of a storage that are not others: the tensor, and the object that is inspected."""


# A function of `torch.cuda` that keeps a GPU busy for a number of its cycles.
GPU_SLEEP = "_sleep"


# Modules.

BACKWARD_HOOKS = "_backward_hooks", "_backward_pre_hooks"
"""Keys of a module's ``__dict__`` for them: a stage takes them off what it leaves out."""

COMPILED_CALL = "_compiled_call_impl"
"""Key of a module's ``__dict__`` for what ``module.compile()`` made: it bypasses ``forward``."""

BatchNorm = nn.modules.batchnorm._BatchNorm  # users derive theirs from it
Norm = nn.modules.batchnorm._NormBase  # also those over one sample

own_parameters: Callable[[nn.Module], dict[str, Any]] = operator.attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Any]] = operator.attrgetter("_buffers")
"""A module's own tensors: read and written where `setattr` would check and register."""

unsaved_buffers = operator.attrgetter("_non_persistent_buffers_set")
"""The names of a module's own buffers that state dicts leave out."""


def holder_of(module: nn.Module, name: str) -> dict[str, Any]:
    """The dict in which a module holds its own parameter or buffer of this name."""
    return own_parameters(module) if name in own_parameters(module) else own_buffers(module)


def flat_weights(module: nn.Module) -> tuple[list[Any], list[str]]:
    """The second list of its weights that a recurrent module computes with, and their names."""
    return getattr(module, "_flat_weights", []), getattr(module, "_flat_weights_names", [])


def forward_hooks(module: nn.Module) -> int:
    """The number of hooks around a module's forward."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def has_global_hooks() -> bool:
    """Return whether there are backward hooks for all modules, also those of a module tracker."""
    registered = nn.modules.module
    before = registered._global_forward_pre_hooks
    return bool(
        registered._global_backward_hooks
        or registered._global_backward_pre_hooks
        or (before and any("ModuleTracker" in repr(hook) for hook in before.values()))
    )


# What runs now.


def modes_on() -> int:
    """The number of function modes on the stack."""
    return internals._len_torch_function_stack()


def taken_off(left: int) -> list[TorchFunctionMode]:
    """Take function modes off the stack, all but the lowest ``left``; the lowest one first."""
    return [overrides._pop_mode() for _ in range(modes_on() - left)][::-1]


def put_on(modes: Iterable[TorchFunctionMode]) -> None:
    """Put function modes onto the stack, without what entering one does besides."""
    for mode in modes:
        overrides._push_mode(mode)


def checkpoint_here() -> Any:
    """The innermost checkpoint (torch.utils.checkpoint) that is running, as an object; or None."""
    found = autograd._top_saved_tensors_default_hooks(False)
    if found is None or not getattr(found[0], "__qualname__", "").startswith("_checkpoint_hook"):
        return None
    return found[0]


NO_CONTEXT = contextlib.nullcontext()


def without_modes() -> Any:
    """Disable dispatch modes in the block: those of an estimate must not see what it computes."""
    return _disable_current_modes() if internals._len_torch_dispatch_stack() else NO_CONTEXT


def compiler() -> Any:
    """Torch's compiler, of which some settings and all counters are private; imported late: 2 s."""
    import torch._dynamo.utils

    return torch._dynamo


def eagerly() -> contextlib.AbstractContextManager[object]:
    """Run compiled functions as they are written; the compiler is not imported for it."""
    if "torch._dynamo" not in sys.modules:
        return NO_CONTEXT
    return torch.compiler.set_stance("force_eager")


# Operators whose cost is counted, and which have no other name.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
GROUPED_PRODUCT = torch.ops.aten._grouped_mm


def allocation_event() -> Any:
    """The event of torch's profiler for an allocation of the CPU; without, memory is unknown."""
    return internals._profiler._EventType.Allocation


# Processes.


def default_store() -> Any:
    """The store of the default process group, which the user may have made."""
    return torch.distributed.distributed_c10d._get_default_store()


def abort_group(group: Any) -> None:
    """End a group of NCCL with all its operations; the public way waits for these to end."""
    torch.distributed.distributed_c10d._abort_process_group(group)


def forget_groups(mesh: Any) -> None:
    """Let a device mesh refer to no process group, so that their connections are closed."""
    getattr(mesh, "_pg_registry", dict[str, object]()).clear()


@contextlib.contextmanager
def fake_mesh(ranks: int) -> Iterator[Any]:
    """A device mesh of ranks that are not there, of which this process is the first.

    The process groups of this process are set aside meanwhile, as in torch's own tests.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed import multi_threaded_pg
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed = torch.distributed
    multi_threaded_pg._install_threaded_pg()
    internals._distributed_c10d._set_thread_isolation_mode(True)
    try:
        distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        yield DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("fake tensor group",))
        distributed.destroy_process_group()
    finally:
        internals._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()


OWN_GROUP = "penstock"
"""The description of the process groups that Penstock makes."""

_TORCH = os.path.dirname(torch.__file__)
_OF_USERS = os.path.join(_TORCH, "distributed", "nn")


class InOneProcess:
    """Hide the default process group from the user's code, which is rank 0 of 1 in the block.

    If it calls another function of `torch.distributed` all the same, ``refuse`` gets its name and
    the rank (None: there is no group). Torch's own calls are unchanged, and so are calls in the
    groups of `OWN_GROUP`.
    """

    def __init__(self, refuse: Callable[[str, int | None], NoReturn]) -> None:
        self._refuse, self._depth = refuse, 0
        self._plain: tuple[Any, Any, Any] = None, None, None

    def __enter__(self) -> None:
        if not self._depth:
            c10d: Any = torch.distributed.distributed_c10d
            world = c10d.GroupMember.WORLD
            self._plain = world, c10d._rank_not_in_group, c10d._get_default_group
            c10d.GroupMember.WORLD, c10d._rank_not_in_group = None, self._is_outside
            c10d._get_default_group = self._group
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            c10d: Any = torch.distributed.distributed_c10d
            world, c10d._rank_not_in_group, c10d._get_default_group = self._plain
            c10d.GroupMember.WORLD = world
            self._plain = None, None, None  # a group is closed when nobody holds it

    def _is_outside(self, group: Any) -> bool:
        """The check that every call in a group makes first."""
        if group is not None:
            self._group()
        return self._plain[1](group)

    def _group(self) -> Any:
        """The default group for torch's own calls; for the user's, one of this process alone."""
        frame: Any = inspect.currentframe()
        called = frame
        while frame.f_code.co_filename.endswith(
            ("distributed_c10d.py", "c10d_logger.py", __file__)
        ):
            called = called if frame.f_code.co_name == "wrapper" else frame
            frame = frame.f_back
        name, group, caller = called.f_code.co_name, called.f_locals.get("group"), frame.f_code
        by_torch = caller.co_filename.startswith(_TORCH)
        by_torch = by_torch and not caller.co_filename.startswith(_OF_USERS)
        if by_torch or getattr(group, "group_desc", "") == OWN_GROUP:
            return self._plain[0]
        if group is None and name in ("get_rank", "get_world_size"):
            return _Alone
        self._refuse(name, self._plain[0] and self._plain[0].rank())


class _Alone:
    """A process group of this process."""

    rank, size = staticmethod(lambda: 0), staticmethod(lambda: 1)
