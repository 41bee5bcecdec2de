"""Planned pipeline-parallel training for PyTorch.

Every exported name is imported when it is first used, so that ``import penstock`` is fast and what
needs no torch does not load it. The stub `__init__.pyi` has the name and module of each, one in a
line. Packages have nouns for names (`penstock.plan`), functions verbs (`plan_pipeline`), so that no
name is both.
"""

from importlib import import_module

__version__ = "0.1.0"

with open(f"{__file__}i", encoding="utf-8") as stub:  # pathlib takes longer to import than all else
    MODULE_OF = {line.split()[3]: line.split()[1] for line in stub if line.startswith("from ")}

__all__ = sorted(MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in MODULE_OF:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    try:
        value = getattr(import_module(MODULE_OF[name]), name)
    except ModuleNotFoundError as error:
        from penstock.errors import missing_for_training

        raise ModuleNotFoundError(missing_for_training(error) or error, name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
