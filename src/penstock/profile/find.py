"""Find a profile by name, or read any of the supported formats."""

import os
from difflib import get_close_matches
from pathlib import Path

from penstock.errors import BadInput
from penstock.files import parse_json, read_text
from penstock.profile.built_in import MODELS
from penstock.profile.json_file import profile_from_json
from penstock.profile.model_profile import ModelProfile


def find_profile(name_or_path: str | Path, profile_batch: int | None = None) -> ModelProfile:
    """The built-in model of this name, or the profile at this path.

    A file is Penstock's JSON or a PipeDream graph text. Only the latter needs ``profile_batch``,
    the batch size that was profiled, because it does not contain it.

    >>> find_profile("bert-48").batch_size
    2

    Raises:
        BadInput: neither a built-in model nor a profile; suggests the closest model name.
    """
    name = str(name_or_path)
    is_built_in = name in MODELS
    if not is_built_in and name == Path(name).stem and not os.path.exists(name):
        near = get_close_matches(name.lower(), MODELS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "use one of them or check the path"
        raise BadInput(
            f"profile '{name}' is neither a built-in model ({', '.join(MODELS)}) nor an existing "
            f"file; {hint}"
        )
    text = "" if is_built_in else read_text(name, "profile")
    if is_built_in or name.endswith(".json") or text.lstrip().startswith("{"):
        if profile_batch is not None:
            raise BadInput(
                f"{'the built-in model' if is_built_in else 'profile'} '{name}' says itself which "
                f"batch was profiled; leave out --profile-batch"
            )
        return MODELS[name]() if is_built_in else profile_in_json(text, name)
    if " -- " not in text:
        raise BadInput(
            f"profile '{name}' is neither JSON nor a PipeDream graph text; make one with "
            f"'penstock profile'"
        )
    if profile_batch is None:
        raise BadInput(
            f"profile '{name}' is a PipeDream text, which does not say for which batch its times "
            f"are; add --profile-batch, the batch that was profiled"
        )
    from penstock.profile.pipedream_text import parse_pipedream

    return parse_pipedream(text, name, profile_batch)


def profile_in_json(text: str, path: str) -> ModelProfile:
    data = parse_json(text, path, "profile")
    if isinstance(data, dict) and "nodes" in data:
        raise BadInput(
            f"profile '{path}' is in Piper's JSON, which is not read any more; 'bert-32' is "
            f"Piper's published profile, and docs/reference/files.md has the format to "
            f"convert to"
        )
    return profile_from_json(data, path)
