"""Find a profile by name, or read any of the supported formats."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import cast

from penstock.errors import BadInput
from penstock.files import parse_json, read_text
from penstock.profile.built_in import MODELS
from penstock.profile.json_file import profile_from_json
from penstock.profile.model_profile import ModelProfile


def find_profile(name_or_path: str | Path, profile_batch: int | None = None) -> ModelProfile:
    """The built-in model of this name, or the profile at this path (see `read_any_profile`).

    >>> find_profile("bert-48").batch_size
    2

    Raises:
        BadInput: neither a built-in model nor a profile; suggests the closest model name.
    """
    name = str(name_or_path)
    if name in MODELS:
        if profile_batch is not None:
            raise BadInput(
                f"the built-in model '{name}' says itself which batch was profiled; leave out "
                f"--profile-batch"
            )
        return MODELS[name]()
    is_bare = name == Path(name).stem and not os.path.exists(name)
    if is_bare:
        near = get_close_matches(name.lower(), MODELS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "use one of them or check the path"
        raise BadInput(
            f"profile '{name}' is neither a built-in model ({', '.join(MODELS)}) nor an existing "
            f"file; {hint}"
        )
    return read_any_profile(name_or_path, profile_batch)


def read_any_profile(path: str | Path, profile_batch: int | None = None) -> ModelProfile:
    """The profile at ``path``: Penstock's JSON, or a PipeDream graph text.

    ``profile_batch`` is the batch size that was profiled. Only PipeDream's text needs it, because
    it does not contain it.
    """
    text = read_text(path, "profile")
    is_json = str(path).endswith(".json") or text.lstrip().startswith("{")
    if not is_json and " -- " not in text:
        raise BadInput(
            f"profile '{path}' is neither JSON nor a PipeDream graph text; make one with "
            f"'penstock profile'"
        )
    if not is_json:
        if profile_batch is None:
            raise BadInput(
                f"profile '{path}' is a PipeDream text, which does not say for which batch its "
                f"times are; add --profile-batch, the batch that was profiled"
            )
        from penstock.profile.pipedream_text import parse_pipedream

        return parse_pipedream(text, path, profile_batch)
    if profile_batch is not None:
        raise BadInput(
            f"profile '{path}' says itself which batch was profiled; leave out --profile-batch"
        )
    data = parse_json(text, path, "profile")
    if isinstance(data, Mapping) and "nodes" in cast("Mapping[str, object]", data):
        raise BadInput(
            f"profile '{path}' is in Piper's JSON, which is not read any more; 'bert-32' is "
            f"Piper's published profile, and docs/reference/files.md has the format to "
            f"convert to"
        )
    return profile_from_json(data, path)
