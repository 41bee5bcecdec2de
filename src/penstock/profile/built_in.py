"""Models of the papers with their published costs, as compact tables in the package.

    name = "three layers"
    source = "measured by hand"
    batch_size = 2
    layers = '''
    layer      forward_ms  backward_ms  activation_mb  parameter_mb  reads
    input      0           0            0.5            0             -
    block*2    2.69        4.47         4.3254         50.385        1,@0
    head       0.1         0.2          0.01           4             1
    '''

Times and activations are of one batch of the profiled size. ``block*2`` means two equal
layers. ``reads`` lists the layers whose output a layer reads: ``1`` is the previous one, ``3`` the
third before, ``@0`` layer 0 at any distance, ``@0=2.5`` 2.5 MB of it. ``-`` means none: an input,
to which no gradient flows back. The backward is divided equally into its two halves. Further
columns may say the megabytes that a layer saves (``saved_mb``), and how many batch normalisations
it has, with how many channels in all (``norms``, ``norm_channels``).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

from pydantic import Field

from penstock.errors import BadInput
from penstock.files import Entry, check_document, parse_toml, read_text
from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    ModelProfile,
    without_batch_inputs,
)

MODELS: dict[str, Callable[[], ModelProfile]] = {
    path.stem: lambda path=path: model_from_table(read_text(path, "model table"), path)
    for path in sorted(Path(__file__).parent.glob("models/*.toml"), key=lambda path: path.stem)
}
"""The models of the package; comments in their files name the sources of their numbers."""


COLUMNS = ("layer", "forward_ms", "backward_ms", "activation_mb", "parameter_mb")
OPTIONAL_COLUMNS = ("saved_mb", "norms", "norm_channels", "reads")
MB = 1e6
LARGEST_FIGURE = 1e15
"""The most milliseconds or megabytes of a layer."""

MOST_COPIES = 10_000
"""The most equal layers of one line."""


class TableEntry(Entry):
    """A whole table; ``saved_mb_per_sample`` is divided in proportion to forward times."""

    name: str
    source: str
    device: str = ""
    batch_size: Annotated[int, Field(ge=1)]
    saved_mb_per_sample: float | None = None
    tokens_per_sample: float = 0.0
    layers: str


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer: numbers by column, and the layers that it reads."""

    name: str
    figures: dict[str, float]
    reads: tuple[str, ...]


def model_from_table(text: str, path: str | Path) -> ModelProfile:
    """The model in the text of a table; ``path`` is used in error messages.

    A layer saves its ``saved_mb`` if the table has that column, otherwise its part of
    ``saved_mb_per_sample`` if given, otherwise its own output.
    """
    entry = check_document(TableEntry, parse_toml(text, path, "model table"), path)
    rows = list(rows_in_table(entry.layers, path))
    batch = entry.batch_size
    forward_ms = sum(row.figures["forward_ms"] for row in rows)
    share = (entry.saved_mb_per_sample or 0) * batch / forward_ms if forward_ms else 0.0
    saved_mb = [
        row.figures.get("saved_mb", row.figures["activation_mb"] if row.reads else 0.0)
        if entry.saved_mb_per_sample is None
        else row.figures["forward_ms"] * share
        for row in rows
    ]
    profile = ModelProfile(
        name=entry.name,
        layers=tuple(
            layer_of_row(index, row, saved, batch)
            for index, (row, saved) in enumerate(zip(rows, saved_mb, strict=True))
        ),
        edges=tuple(
            dict.fromkeys(
                edge for index in range(len(rows)) for edge in edges_into(index, rows, batch, path)
            )
        ),
        batch_size=batch,
        source=entry.source,
        device=entry.device,
        tokens_per_sample=entry.tokens_per_sample,
    )
    return without_batch_inputs(profile)


def rows_in_table(table: str, path: str | Path) -> Iterator[LayerRow]:
    """The rows, each repeated by its count."""
    header, *lines = [line.split() for line in table.splitlines() if line.strip()] or [[]]
    optional = [column for column in OPTIONAL_COLUMNS if column in header]
    if header != [*COLUMNS, *optional]:
        raise BadInput(
            f"{path}: the table begins with '{' '.join(header)}'; its columns are "
            f"{', '.join(COLUMNS)} and perhaps {', '.join(OPTIONAL_COLUMNS)}"
        )
    for number, line in enumerate(lines):
        cells = dict(zip_longest(header, line))
        try:
            name, _, count = str(cells.pop("layer")).partition("*")
            reads = str(cells.pop("reads", None) or ("1" if number else "-"))
            figures = {column: float(str(cell)) for column, cell in cells.items()}
            copies = int(count or 1)
        except ValueError as cause:
            raise BadInput(f"{path}: '{' '.join(line)}' is no layer: {cause}") from None
        if not all(0 <= figure <= LARGEST_FIGURE for figure in figures.values()):
            raise BadInput(
                f"{path}: '{' '.join(line)}': figures must be from 0 to {LARGEST_FIGURE:g}"
            )
        if not 1 <= copies <= MOST_COPIES:
            raise BadInput(f"{path}: '{name}*{count}': write a count from 1 to {MOST_COPIES}")
        row = LayerRow(name, figures, () if reads == "-" else tuple(reads.split(",")))
        yield from [row] * copies


def layer_of_row(index: int, row: LayerRow, saved_mb: float, batch: int) -> LayerCost:
    half_s = row.figures["backward_ms"] / 1000 / 2
    return LayerCost(
        name=f"{index} {row.name}",
        forward_s=Affine(0.0, row.figures["forward_ms"] / 1000 / batch),
        backward_input_s=Affine(0.0, half_s / batch),
        backward_weight_s=Affine(0.0, half_s / batch),
        parameter_bytes=round(row.figures["parameter_mb"] * MB),
        saved_bytes=Affine(0.0, saved_mb * MB / batch),
        norms=round(row.figures.get("norms", 0)),
        norm_channels=round(row.figures.get("norm_channels", 0)),
    )


def edges_into(index: int, rows: list[LayerRow], batch: int, path: str | Path) -> Iterator[Edge]:
    for read in rows[index].reads:
        place, _, size = read.partition("=")
        try:
            producer = int(place[1:]) if place.startswith("@") else index - int(place)
            size_mb = float(size) if size else None
        except ValueError:
            raise BadInput(
                f"{path}: layer {index} reads '{read}'; write '1' for the layer before, '@0' for "
                f"layer 0, or '@0=2.5' for 2.5 MB of it"
            ) from None
        if not 0 <= producer < index:
            raise BadInput(f"{path}: layer {index} reads '{read}', which is no earlier layer")
        whole_mb = rows[producer].figures["activation_mb"]
        bytes_ = Affine(0.0, (whole_mb if size_mb is None else size_mb) * MB / batch)
        gradient = bytes_ if rows[producer].reads else Affine()
        tensor = f"{producer}={size}" if size else str(producer)
        yield Edge(producer, index, tensor, bytes_, gradient)
