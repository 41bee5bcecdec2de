"""Numbers in a readable form: seconds, bytes, percentages, ranges of names."""

from collections.abc import Iterable, Sequence
from html import escape

MOST_ROWS = 10
"""Rows of a notebook's table at its beginning, and at its end."""


def seconds_text(seconds: float) -> str:
    """A duration in the unit that suits it.

    >>> seconds_text(0.01234), seconds_text(2.5), seconds_text(0)
    ('12.3 ms', '2.50 s', '0 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return f"{three_digits(seconds / 1e-6)} µs" if seconds else "0 s"


def size_text(size_bytes: float) -> str:
    """A number of bytes in decimal units.

    >>> size_text(999), size_text(16e9), size_text(18_240_000)
    ('999 B', '16.0 GB', '18.2 MB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size_bytes) >= scale:
            return f"{three_digits(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def rate_text(bytes_per_s: float) -> str:
    """A number of bytes per second in decimal units.

    >>> rate_text(125e6)
    '125 MB/s'
    """
    return f"{size_text(bytes_per_s)}/s"


def percent_text(share: float) -> str:
    """A fraction as a percentage.

    >>> percent_text(0.125), percent_text(-0.0312)
    ('12.5 %', '-3.1 %')
    """
    return f"{share * 100:.1f} %"


def layers_text(names: Sequence[str]) -> str:
    """A run of layers, by the names of its first and last layer.

    >>> layers_text(["embed"]), layers_text(["embed", "block.0", "block.1"])
    ('embed', 'embed ... block.1')
    """
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


def counted(number: int, thing: str) -> str:
    """A number with its noun, in the plural if needed.

    >>> counted(1, "stage"), counted(3, "stage"), counted(0, "micro-batch")
    ('1 stage', '3 stages', '0 micro-batches')
    """
    plural = "es" if thing.endswith("ch") else "s"
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{plural}"


def numbered(word: str, numbers: Sequence[int]) -> str:
    """A word with its numbers, in the plural for several.

    >>> numbered("rank", [1]), numbered("rank", [1, 2])
    ('rank 1', 'ranks 1, 2')
    """
    return f"{word}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def numbers_text(numbers: Sequence[int]) -> str:
    """Numbers as a short list; consecutive numbers are shown as a range.

    >>> numbers_text((3,)), numbers_text((0, 1, 2, 3, 4)), numbers_text((2, 2, 1))
    ('3', '0-4', '2, 2, 1')
    """
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 and tuple(numbers) == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    if len(numbers) > 4 and len(set(numbers)) == 1:
        return f"{len(numbers)} x {first}"
    return ", ".join(map(str, numbers))


def html_table(heads: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """A table for a notebook, with the first and the last rows of many.

    >>> html_table(["stage"], [["<0>"]])
    '<table><thead><tr><th>stage</th></tr></thead><tbody><tr><td>&lt;0&gt;</td></tr></tbody></table>'
    """
    shown = list(rows)
    if len(shown) > 2 * MOST_ROWS:
        shown[MOST_ROWS:-MOST_ROWS] = [["..."] * len(heads)]
    below = f"<p>{escape(caption)}</p>" if caption else ""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in shown)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def three_digits(value: float) -> str:
    """A number with three significant digits and no exponent.

    >>> three_digits(1.5), three_digits(12.34), three_digits(123.4), three_digits(1234.5)
    ('1.50', '12.3', '123', '1234')
    """
    size = abs(value)
    return f"{value:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"
