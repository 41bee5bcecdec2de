"""Give real values to the tensors of a stage of a model that was built on the meta device.

Every tensor is initialised alone, by the model's own methods, with a seed made from the run's seed
and the tensor's name. So its values depend neither on the cuts of the plan nor on the rank, and no
rank ever holds more than its own stage.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.capture.forward.stage_module import StageModule, StageProgram
from penstock.capture.record.absent import Absent
from penstock.capture.record.model_and_loss import UserProgram
from penstock.capture.record.model_state import Place, exchanged
from penstock.capture.tensor_parts import become
from penstock.errors import BadInput
from penstock.torch_internals import own_buffers, own_parameters


def materialise(program: StageProgram, *, device: torch.device | str, seed: int) -> None:
    """Put the stage's parameters and buffers on ``device``, with values for those on meta.

    Values come from ``reset_parameters`` of the module that owns the tensor and of the modules
    around it, then from ``_init_weights`` of the model (a convention of Hugging Face and others).
    Tensors with values keep them and are moved. The stage has the user's own modules, whose other
    tensors stay as they are.
    """
    stage, home = program.module, torch.device(device)
    user = stage.graph.program
    made: dict[int, torch.Tensor] = {}
    named = named_tensors(stage)
    with torch.random.fork_rng(devices=[]), exchanged(_all_on_meta(user)):
        for name, tensor in named:
            if tensor.is_meta and id(tensor) not in made:
                made[id(tensor)] = _initialised(user, name, tensor, seed).to(home)
    for name, tensor in named:
        if id(tensor) in made:
            put_tensor(stage, name, tensor, made[id(tensor)])
    stage.to(home)


def check_values(program: StageProgram) -> None:
    """Raise `BadInput` if an earlier pipeline has freed a parameter of a stage."""
    for name, parameter in program.module.named_parameters():
        if type(parameter) is Absent:
            raise BadInput(
                f"'{name}' has no values on this rank: an earlier Pipeline of the model had it on "
                f"another; end that with close(gather=True), or build a new model"
            )


def named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, with all their names."""
    named = list(module.named_parameters(remove_duplicate=False))
    return [*named, *module.named_buffers(remove_duplicate=False)]


def _all_on_meta(user: UserProgram) -> Iterator[tuple[Place, torch.Tensor | None]]:
    """Meta tensors for all places of the program, so that initialisers change no real ones."""
    for _, part in user.named_modules():
        for holder in (own_parameters(part), own_buffers(part)):
            for name, tensor in list(holder.items()):
                blank = tensor
                if tensor is not None and not tensor.is_meta:
                    like = tensor.shape, tensor.stride()  # quantised ones have no `empty_like`
                    blank = torch.empty_strided(*like, dtype=tensor.dtype, device="meta")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    blank = nn.Parameter(blank, False) if is_parameter else blank
                yield (holder, name), blank


def put_tensor(stage: StageModule, name: str, before: torch.Tensor, value: torch.Tensor) -> None:
    """Replace ``before`` by ``value`` in a stage that holds it as ``name``."""
    if isinstance(before, nn.Parameter):
        # The user's own object gets the values, so that his references stay true.
        become(before, value)
    else:
        path, _, last = name.rpartition(".")
        own_buffers(stage.get_submodule(path))[last] = value


def _initialised(user: UserProgram, name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """A real tensor on the CPU with the initial values of the program's tensor ``name``."""
    path, _, last = name.rpartition(".")
    owner = user.module(path)
    has_nan = like.is_floating_point() or like.is_complex()
    # Values before initialisation, which show what was not set.
    blanks = [float("nan")] if has_nan else [0, 1]
    results = [_run_initialisers(user, name, like, seed, blank) for blank in blanks]
    is_set = torch.equal(*results) if len(results) > 1 else not results[0].isnan().any()
    value = results[0] if is_set else _from_constructor(owner, last, like)
    if value is None:
        raise BadInput(
            f"{name!r} of {type(owner).__name__} is on the meta device and nothing initialises "
            "it; set it in reset_parameters() of that class (or in _init_weights(module) of "
            "the model), or build the model on the CPU"
        )
    return value


def _run_initialisers(
    user: UserProgram, name: str, like: torch.Tensor, seed: int, blank: float
) -> torch.Tensor:
    """The tensor after all initialisers ran with only it real and everything else on meta."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    value = torch.full(like.shape, blank, dtype=like.dtype, device="cpu")
    holder, last = user.places(name)
    before = holder[last]
    holder[last] = nn.Parameter(value, False) if isinstance(before, nn.Parameter) else value
    try:
        with torch.no_grad():
            for initialise in _initialisers(user, name):
                initialise()
        return holder[last].detach()
    finally:
        holder[last] = before


def _initialisers(user: UserProgram, name: str) -> Iterator[Callable[[], object]]:
    """The functions that initialise a tensor: the owner's, then those of modules around it.

    Then follow the model's ``_init_weights``, and last what peft's LoRA layers do.
    """
    parts = name.split(".")[:-1]
    around = [user.module(".".join(parts[:k])) for k in range(len(parts), -1, -1)]
    for module in around:
        for method in ("reset_parameters", "_reset_parameters"):
            if callable(reset := getattr(module, method, None)):
                yield reset
                break
    for index, module in enumerate(around):
        model_around: Any = next((m for m in around[index:] if _has_init_weights(m)), None)
        if model_around is not None:
            yield partial(model_around._init_weights, module)
    # Adapter layers come last: one of their matrices starts at zero, whatever others start at.
    for module in around:
        if callable(reset := getattr(module, "reset_lora_parameters", None)):
            for adapter, settings in getattr(user.model, "peft_config", {}).items():
                yield partial(reset, adapter, settings.init_lora_weights)


def _has_init_weights(module: nn.Module) -> bool:
    method = getattr(module, "_init_weights", None)
    return callable(method) and len(inspect.signature(method).parameters) == 1


def _from_constructor(owner: nn.Module, last: str, like: torch.Tensor) -> torch.Tensor | None:
    """The buffer of a new module, if the class of ``owner`` needs only a ``config``."""
    config = getattr(owner, "config", None)
    if config is None or last in own_parameters(owner):
        return None
    parameters = inspect.signature(type(owner)).parameters
    required = [p.name for p in parameters.values() if p.default is p.empty]
    if required != ["config"]:
        return None
    fresh = type(owner)(config=config)
    found = dict(fresh.named_buffers(recurse=False)).get(last)
    same = found is not None and found.shape == like.shape and found.dtype == like.dtype
    return found if same else None
