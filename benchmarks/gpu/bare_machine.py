"""Lets Penstock run where there is no compiled core, or no pydantic, as on a bare GPU machine.

What is missing is replaced before anything imports it, also in the processes that are started:

- of the core, one function in plain Python, by which an order is found free of deadlock. Whatever
  else is called of it raises an error that names it: orders that only the core can make, and
  predictions, travel in `plans.json`;
- of pydantic, what reads a document without checking it.
"""

import sys
from dataclasses import is_dataclass
from importlib.util import find_spec
from inspect import get_annotations
from math import inf
from types import ModuleType, UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

__all__ = ["CORE_IS_HERE", "PYDANTIC_IS_HERE"]

FORWARD, WEIGHTS, RECOMPUTE = 0, 3, 4
"""Kinds of actions, as `penstock.schedule.action` codes them; 1 and 2 are backwards."""


class IdealPipe:
    """As `penstock.core.native.IdealPipe`."""

    def __init__(self, stages: int, micro_batches: int, seconds: Any, transfer_s: Any) -> None:
        self.stages, self.micro_batches = stages, micro_batches
        self.seconds, self.transfer_s = seconds, transfer_s


def play_orders(pipe: IdealPipe, first: Any, actions: Any, start_s: Any) -> list[int]:
    """As `penstock.core.native.play_orders`: starts are written, and where each order stops."""
    cells = pipe.stages * pipe.micro_batches
    codes = [divmod(int(action), cells) for action in actions]
    forward, gradient = [inf] * cells, [inf] * cells
    again = [-inf] * cells
    for kind, cell in codes:
        if kind == RECOMPUTE:
            again[cell] = inf

    def ready_s(kind: int, cell: int) -> float:
        stage, each = cell // pipe.micro_batches, pipe.micro_batches
        if kind == FORWARD:
            return forward[cell - each] + pipe.transfer_s[stage - 1] if stage else 0.0
        if kind == WEIGHTS:
            return gradient[cell]
        if kind == RECOMPUTE:
            return forward[cell]
        here_s = max(forward[cell], again[cell])
        if stage + 1 == pipe.stages:
            return here_s
        return max(here_s, gradient[cell + each] + pipe.transfer_s[stage])

    reached, free_s = list(first[:-1]), [0.0] * (len(first) - 1)
    moved = True
    while moved:
        moved = False
        for order, end in enumerate(first[1:]):
            while reached[order] < end:
                kind, cell = codes[reached[order]]
                begin_s = max(free_s[order], ready_s(kind, cell))
                if begin_s == inf:
                    break
                start_s[reached[order]] = begin_s
                free_s[order] = begin_s + pipe.seconds[kind, cell // pipe.micro_batches]
                if kind != WEIGHTS:
                    ends = {FORWARD: forward, RECOMPUTE: again}.get(kind, gradient)
                    ends[cell] = free_s[order]
                reached[order] += 1
                moved = True
    return reached


def absent(module: str, name: str) -> type:
    """A class that stands for a name of a module that is not here; making one is refused."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError(f"{module}.{name} is not on this machine; run where it is")

    return type(name, (), {"__init__": refuse})


class Core(ModuleType):
    """`penstock.core.native` where it was not built."""

    IdealPipe = IdealPipe
    play_orders = staticmethod(play_orders)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        found = absent(self.__name__, name)
        setattr(self, name, found)
        return found


class Unchecked:
    """A pydantic model that takes what it is given."""

    model_config: ClassVar[Any] = {}

    def __init__(self, **values: Any) -> None:
        kinds = get_type_hints(type(self), include_extras=True)
        for name in self.model_fields:
            kind = kinds[name]
            if name in values:
                setattr(self, name, taken(kind, values[name]))
            else:
                default = getattr(type(self), name)
                made = default.make() if isinstance(default, Default) else default
                setattr(self, name, made)

    def __init_subclass__(cls, **_: Any) -> None:
        own = dict.fromkeys(get_annotations(cls))
        cls.model_fields = {**getattr(cls, "model_fields", {}), **own}
        cls.model_fields.pop("model_config", None)

    @classmethod
    def model_validate(cls, data: Any) -> Any:
        """The model of a table."""
        return cls(**{key: value for key, value in data.items() if key in cls.model_fields})

    def model_dump(self) -> dict[str, Any]:
        """The table of a model."""
        return {name: getattr(self, name) for name in self.model_fields}


class Default:
    """What a field has if it is not given."""

    def __init__(self, default: Any = None, *, default_factory: Any = None, **_: Any) -> None:
        self.make = default_factory or (lambda: default)


def taken(kind: Any, value: Any) -> Any:
    """A value of a document, with its tables as the models that an annotation names."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return taken(inner[0], value)
    if origin in (Union, UnionType):
        models = [one for one in inner if isinstance(value, dict) and is_model(one)]
        return taken(models[0], value) if models else value
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return origin(taken(inner[0], item) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: taken(inner[1], item) for key, item in value.items()}
    if is_dataclass(kind) and isinstance(value, dict):
        kinds = get_type_hints(kind, include_extras=True)
        return kind(**{name: taken(kinds[name], own) for name, own in value.items()})
    return kind.model_validate(value) if is_model(kind) and isinstance(value, dict) else value


class Reader:
    """What reads a kind of value without checking it."""

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def validate_python(self, value: Any, **_: Any) -> Any:
        """The value, with its tables as what the kind names."""
        return taken(self._kind, value)


def is_model(kind: Any) -> bool:
    """Whether an annotation is a model."""
    return isinstance(kind, type) and issubclass(kind, Unchecked)


def unchecked_pydantic() -> dict[str, ModuleType]:
    """The modules of pydantic that Penstock imports."""
    pydantic, core = ModuleType("pydantic"), ModuleType("pydantic_core")
    dataclasses = ModuleType("pydantic.dataclasses")
    nothing = lambda *_, **__: None  # noqa: E731
    for name in ("AfterValidator", "BeforeValidator", "StringConstraints", "GetCoreSchemaHandler"):
        setattr(pydantic, name, nothing)
    pydantic.ConfigDict = dict  # type: ignore[attr-defined]
    pydantic.BaseModel, pydantic.Field = Unchecked, Default  # type: ignore[attr-defined]
    pydantic.model_validator = lambda **_: lambda method: method  # type: ignore[attr-defined]
    pydantic.ValidationError = type("ValidationError", (ValueError,), {})  # type: ignore[attr-defined]
    pydantic.TypeAdapter = Reader  # type: ignore[attr-defined]
    core.ErrorDetails = core.CoreSchema = dict  # type: ignore[attr-defined]
    core.core_schema = ModuleType("pydantic_core.core_schema")  # type: ignore[attr-defined]
    core.PydanticCustomError = type("PydanticCustomError", (ValueError,), {})  # type: ignore[attr-defined]
    pydantic.dataclasses = dataclasses  # type: ignore[attr-defined]
    return {"pydantic": pydantic, "pydantic_core": core, "pydantic.dataclasses": dataclasses}


def core_is_here() -> bool:
    """Whether the compiled core can be loaded; if not, its stand-in is put in its place."""
    try:
        import penstock.core.native
    except Exception:  # not built, or for another Python
        for name in [name for name in sys.modules if name.startswith("penstock.core")]:
            del sys.modules[name]
    else:
        return bool(penstock.core.native.version)
    package, native = ModuleType("penstock.core"), Core("penstock.core.native")
    package.native, package.__path__ = native, []  # type: ignore[attr-defined]
    sys.modules |= {"penstock.core": package, "penstock.core.native": native}
    return False


def is_importable(name: str) -> bool:
    """Whether a module can be found."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


PYDANTIC_IS_HERE = is_importable("pydantic") and is_importable("pydantic_core")
"""Whether documents are checked."""

if not PYDANTIC_IS_HERE:
    sys.modules |= unchecked_pydantic()

CORE_IS_HERE = core_is_here()
"""Whether orders and predictions can be made here."""
