"""Scripts of the repository that are in no package, as modules that tests can call."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def script_at(path: str, name: str) -> Any:
    """The script at ``path`` in the repository, run as the module ``name``.

    What it defines is found under that name, as dataclasses and pickles ask for.
    """
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
