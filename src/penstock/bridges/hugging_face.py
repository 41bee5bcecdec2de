"""Hugging Face's ``base_model_pp_plan``: which modules of a model may be stages.

Source of the format: transformers 5.23, ``configuration_utils.py`` and
``distributed/pipeline_parallel.py``. The plan names the parts of the base model in order, each with
its inputs and outputs, and no cuts. transformers cuts the list of blocks evenly: ``num_layers //
pp_size`` to a rank, and the rest to the last. What is before it is on the first rank, what follows
on the last. The plan belongs to the config's class, and ``config.json`` leaves it out. So the file
is the plan as JSON, alone or under the key ``base_model_pp_plan``:

    {"embed_tokens": [["input_ids"], ["inputs_embeds"]], "layers": [...], "norm": [...]}
"""

from typing import cast

from penstock.bridges.block_list import stages_of_counts, transformer_blocks
from penstock.bridges.layout import PipelineLayout
from penstock.bridges.module_chain import module_chain
from penstock.bridges.request import ImportRequest
from penstock.document import parse_json, read_text, shown
from penstock.errors import BadInput

__all__ = ["import_hugging_face"]


def import_hugging_face(request: ImportRequest) -> PipelineLayout:
    """The layout that transformers makes of a plan on ``ranks`` ranks.

    Raises:
        BadInput: no plan, a number of ranks that is not asked or too large, or a plan without the
            list of the profile's blocks.
    """
    path, profile, size = request.path, request.profile, request.asked.ranks
    parts = plan_in(request)
    first, last = transformer_blocks(module_chain(profile), profile)
    blocks = module_chain(profile).modules[first].container or ""
    listed = next((name for name in parts if is_end_of(name, blocks)), None)
    if listed is None:
        raise BadInput(
            f"{path}: the plan names {', '.join(parts[:4])}, and none is the list "
            f"'{blocks}' of profile '{profile.name}'; is it the plan of another model?"
        )
    known = {module.name for module in module_chain(profile).modules[:first]}
    for name in parts[: parts.index(listed)]:
        if not any(is_end_of(name, module) for module in known):
            raise BadInput(
                f"{path}: the plan names '{name}' before '{listed}', and profile "
                f"'{profile.name}' has {', '.join(sorted(known)) or 'nothing'} there; is it the "
                f"plan of another model?"
            )
    count = last - first
    if not 1 <= size <= count:
        raise BadInput(
            f"{path}: the plan says which modules may be stages, not how many stages there are; "
            f"name 1 to {count} ranks with --ranks"
        )
    each = count // size
    counts = [each] * (size - 1) + [count - each * (size - 1)]
    return PipelineLayout(stages_of_counts(counts, profile, path), tuple(range(size)))


def is_end_of(name: str, path: str) -> bool:
    """Whether a module of the base model is the one at a path from the whole model."""
    return path == name or path.endswith(f".{name}")


def plan_in(request: ImportRequest) -> list[str]:
    """The names of a plan, in order.

    Raises:
        BadInput: the file holds none.
    """
    path = request.path
    data = parse_json(read_text(path, "layout"), path, "layout")
    table = table_of(data)
    parts = table_of(table["base_model_pp_plan"]) if "base_model_pp_plan" in table else table
    for name, flows in parts.items():
        if not isinstance(flows, list) or len(cast("list[object]", flows)) != 2:
            raise BadInput(
                f"{path}: '{name}' is {shown(cast('object', flows))}; a plan gives each module two "
                f"lists, its inputs and its outputs"
            )
    if not parts:
        raise BadInput(
            f"{path} holds no base_model_pp_plan; write that of the config's class there"
        )
    return list(parts)


def table_of(value: object) -> dict[str, object]:
    """A JSON object; empty for another value."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}
