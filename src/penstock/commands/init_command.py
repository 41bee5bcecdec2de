"""``penstock init``: a first job, with a comment on each key."""

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from penstock.commands import options
from penstock.commands.terminal import Terminal
from penstock.errors import BadInput
from penstock.files import check_place, read_config, write_text

HELD_OUT = 0.1
"""The share that jobs hold out of text by themselves, too."""

LONGEST_WINDOW = 128
"""Tokens in a window of text, unless the model reads fewer."""

PLANNED_WINDOW = 2048
"""The same, where there is no text yet and the job only serves to plan."""

TYPE_OF_WEIGHTS = ("dtype", "torch_dtype")
"""Keys of configurations for the type of their weights."""

POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""Keys of configurations for the largest number of tokens that their model reads."""

OWN_MODEL = ("penstock.examples.gpt_text:Gpt", "length = {length}, blocks = 4, width = 192")
"""A small GPT over bytes, for text without a model."""


def init(
    *,
    config: Annotated[
        str, Option("--from", metavar="CONFIG", help="Use this config.json of transformers.")
    ] = "",
    model: Annotated[
        str,
        Option(metavar="MODEL", help="Use a model of your own, module:class or module:function."),
    ] = "",
    data: Annotated[
        str,
        Option(
            metavar="DATA", help="Train on a text file, a directory of text, or module:dataset."
        ),
    ] = "",
    out: options.Out = "job.toml",
    terminal: Terminal,
) -> None:
    """Write a commented job file for 'penstock train', to -o.

    Without options it varies a built-in job.
    """
    if config and model:
        raise BadInput("--from and --model both name a model; leave one of them out")
    if not out.endswith(".toml"):
        raise BadInput(f"-o {out} does not end in .toml; a job file does")
    if Path(out).exists():
        raise BadInput(f"'{out}' exists, and is not written over; name another file with -o")
    check_place(out)
    lines = [f"# Train it: penstock train {out}", ""]
    if not (config or model or data):
        lines += [
            "# A built-in job (see 'penstock list'); keys below change it.",
            'base = "gpt-text"',
        ]
    else:
        lines += [*model_lines(config, model, out), "", *data_lines(config, model, data, out)]
    write_text(out, "\n".join([*lines, "", *TRAINING]) + "\n")
    following = (
        f"penstock profile {out} --estimate GPU" if config and not data else f"penstock train {out}"
    )
    terminal.show({"job": out}, f"wrote {out}; next: {following}")


TRAINING = (
    "# Samples in one optimizer step; a plan cuts them into micro-batches.",
    "batch_size = 16",
    "# Optimizer steps.",
    "steps = 100",
    "# Fixes the first weights and the order of samples.",
    "seed = 0",
    '# "bfloat16" computes products in that type; weights stay as they are.',
    'autocast = "off"',
    "# How often, in steps, held-out samples are judged and a checkpoint is written (0: never).",
    "evaluate_every = 50",
    "checkpoint_every = 100",
    "",
    "[optimizer]",
    '# "adamw", "adam", "sgd" or "muon".',
    'name = "adamw"',
    "learning_rate = 1e-3",
    "weight_decay = 0.01",
    "# The rate rises over this many steps, and then falls as a cosine to a tenth.",
    "warm_up_steps = 10",
)


def model_lines(config: str, model: str, out: str) -> list[str]:
    """The keys of the model."""
    if config:
        known = read_config(config)
        dtype = quoted(str(next(filter(None, map(known.get, TYPE_OF_WEIGHTS)), "float32")))
        kinds = known.get("architectures")
        kind = kinds[0] if isinstance(kinds, list) and kinds else "AutoModelForCausalLM"
        place = quoted(from_folder_of(config, out))
        return [
            "# A class of transformers, whose configuration is the file with these changes.",
            '# The dtype is that of the weights: "float32" for finer updates and twice the bytes.',
            f"model = {quoted(f'transformers:{kind}')}",
            f"model_arguments = {{ config = {place}, dtype = {dtype} }}",
            "# A plan cuts between blocks.",
            'granularity = "block"',
        ]
    if model:
        return [
            "# Called without arguments; if it needs some: model_arguments = { layers = 4 }",
            f"model = {quoted(model)}",
        ]
    place, arguments = OWN_MODEL
    return [
        "# A small GPT over bytes; name a model of your own in its place.",
        f"model = {quoted(place)}",
        f"model_arguments = {{ {arguments.format(length=LONGEST_WINDOW)} }}",
    ]


def data_lines(config: str, model: str, data: str, out: str) -> list[str]:
    """The keys of the data and the loss."""
    loss = (
        [] if config else ["# loss(output, target)", 'loss = "torch.nn.functional:cross_entropy"']
    )
    if config and not data:
        return [
            "# Enough for 'penstock profile --estimate GPU'. To train, name text as well:",
            f'# text = {{ path = "corpus.txt", length = {LONGEST_WINDOW} }}',
            f"text = {{ length = {window_of(config, PLANNED_WINDOW)} }}",
        ]
    if not data:
        return [
            '# A dataset or DataLoader as module:name, or text in its place: text = "corpus.txt"',
            'data = "my_data:dataset"',
            *loss,
        ]
    if not Path(data).exists():
        if ":" not in data:
            raise BadInput(f"--data '{data}' does not exist; name text, or a dataset module:name")
        return [
            "# A dataset, a DataLoader, or what makes one; a share of it is held out.",
            f"data = {quoted(data)}",
            f"held_out = {HELD_OUT}",
            *loss,
        ]
    length = LONGEST_WINDOW
    tokenizer = ""
    if config:
        length = window_of(config, length)
        beside_it = Path(config).parent / "tokenizer.json"
        if beside_it.exists():
            tokenizer = f"tokenizer = {quoted(from_folder_of(str(beside_it), out))}, "
    text = f"path = {quoted(from_folder_of(data, out))}, {tokenizer}length = {length}"
    remark = "" if tokenizer else '; without tokenizer = "tokenizer.json", its bytes are the tokens'
    lines = [f"# Text in windows of this many tokens{remark}.", f"text = {{ {text} }}"]
    if not config:
        lines += ['loss = "penstock.train.samples:next_token_loss"']
    return [
        *lines,
        "# The share of samples that the training does not see.",
        f"held_out = {HELD_OUT}",
    ]


def window_of(config: str, most: int) -> int:
    """The tokens in a window: as many as a model reads, and at most ``most``."""
    known = map(read_config(config).get, POSITIONS)
    return min([most, *(longest for longest in known if isinstance(longest, int))])


def from_folder_of(place: str, out: str) -> str:
    """A path as it is seen from the job's file."""
    own = Path(place).resolve()
    folder = Path(out).resolve().parent
    return str(own.relative_to(folder) if own.is_relative_to(folder) else own)


def quoted(text: str) -> str:
    """A TOML string."""
    return json.dumps(text, ensure_ascii=False)
