"""Changes files at random, as damage, a slip of the hand or malice would."""

import random
import re
from collections.abc import Callable, Sequence

__all__ = ["mutated"]

NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
TEXT = re.compile(rb'"[^"\n]*"')
WORD = re.compile(rb"[A-Za-z_]\w*")

MOST_CHANGES = 4
MOST_REPEATED = 1 << 16
"""Bytes that a repeated piece may take."""

FIGURES: Sequence[bytes] = (
    *(b"0", b"-1", b"1", b"-0.0", b"1e-320", b"1e308", b"-1e308", b"1e400", b"0.1", b"1e19"),
    *(b"65536", b"65537", b"1000000", b"1000000007", b"720720000", b"2147483648"),
    *(b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809"),
    *(b"Infinity", b"-Infinity", b"NaN", b"inf", b"nan", b"true", b"null", b'"1"', b"[]", b"{}"),
    *(b"9" * 400, b"1" * 5000, b"0x10", b"1_0", b"1e5000000", b"00", b"[1e308;1e308]"),
)
"""What a number becomes."""

STRINGS: Sequence[bytes] = (
    *(b'""', b'"\\u0000"', b'"\\ud800"', b'"\\n"', b'"../../up"', b'"/"', b'"a:b"', b'":"'),
    *(b'"builtins:exit"', b'".x:y"', b'"os:nothing"', b'"1e5000000 GB/s"', b'"nan GB"', b'"-1 s"'),
    *(b'"' + b"x" * 5000 + b'"', '"\u202e\u00e9\U0001f600"'.encode(), b'"\xff"', b"0", b"[]"),
    *(b"{}", b"null", b"true", b'["a"]', b'"\\u001b[31m"', b'"inf B"', b'"1e400 B"'),
)
"""What a string becomes."""

INSERTED: Sequence[bytes] = (
    *(b"\x00", b"\xff", b"\n", b" ", b",", b"[", b"]", b"{", b"}", b'"', b"=", b":", b"*", b"@"),
    *(b"[" * 2000, b'{"a":' * 2000, b"a." * 2000, b"#", b"\\", b"-", b"\r", b"\t", b"\xc3"),
    *(b"__proto__", b"[[", b"]]", b"'''", b"\xed\xa0\x80", b"  -- ", b";"),
)
"""What is put between two characters."""

Change = Callable[[bytes, random.Random], bytes]


def mutated(starts: Sequence[bytes], number: int) -> bytes:
    """Input ``number``: one of ``starts`` with up to `MOST_CHANGES` changes, the same each time."""
    draw = random.Random(number)
    data = draw.choice(starts)
    for _ in range(draw.randint(1, MOST_CHANGES)):
        other = draw.choice(starts)
        change = draw.choice(CHANGES)
        data = joined(data, other, draw) if change is cut else change(data, draw)
    return data


def replaced(pattern: re.Pattern[bytes], values: Sequence[bytes]) -> Change:
    """A change of one of the places where ``pattern`` is found to one of ``values``."""

    def change(data: bytes, draw: random.Random) -> bytes:
        places = [found.span() for found in pattern.finditer(data)]
        if not places:
            return data
        begin, end = draw.choice(places)
        return data[:begin] + draw.choice(values) + data[end:]

    return change


def flipped(data: bytes, draw: random.Random) -> bytes:
    """One bit is turned over."""
    if not data:
        return data
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def span(data: bytes, draw: random.Random) -> tuple[int, int]:
    """Begin and end of a piece, most often a short one."""
    begin = draw.randint(0, len(data))
    return begin, min(len(data), begin + int(draw.paretovariate(0.7)))


def deleted(data: bytes, draw: random.Random) -> bytes:
    """A piece is missing."""
    begin, end = span(data, draw)
    return data[:begin] + data[end:]


def doubled(data: bytes, draw: random.Random) -> bytes:
    """A piece is there twice."""
    begin, end = span(data, draw)
    return data[:end] + data[begin:]


def repeated(data: bytes, draw: random.Random) -> bytes:
    """A piece is there many times, which takes long where time grows with the length squared."""
    begin, end = span(data, draw)
    times = min(2 ** draw.randint(1, 14), MOST_REPEATED // max(1, end - begin))
    return data[:end] + data[begin:end] * times + data[end:]


def cut(data: bytes, draw: random.Random) -> bytes:
    """The end is missing."""
    return data[: draw.randint(0, len(data))]


def joined(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """The end is missing, and half of the time the end of another file is there instead."""
    return cut(data, draw) + (other[draw.randint(0, len(other)) :] if draw.random() < 0.5 else b"")


def inserted(data: bytes, draw: random.Random) -> bytes:
    """Something is put in."""
    place = draw.randint(0, len(data))
    return data[:place] + draw.choice(INSERTED) + data[place:]


def line_moved(data: bytes, draw: random.Random) -> bytes:
    """A line is deleted, doubled, or put elsewhere."""
    lines = data.split(b"\n")
    line = lines[draw.randrange(len(lines))]
    if draw.random() < 0.7:
        lines.remove(line)
    if draw.random() < 0.7:
        lines.insert(draw.randint(0, len(lines)), line)
    return b"\n".join(lines)


def word_swapped(data: bytes, draw: random.Random) -> bytes:
    """A word stands where another stood."""
    words = [found.group() for found in WORD.finditer(data)]
    return replaced(WORD, words)(data, draw) if words else data


CHANGES: Sequence[Change] = (
    *[replaced(NUMBER, FIGURES)] * 4,
    *[replaced(TEXT, STRINGS)] * 2,
    *(flipped, deleted, doubled, repeated, cut, inserted, line_moved, word_swapped),
)
