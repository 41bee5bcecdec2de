"""Every figure of README and the docs, held against the file that it comes from.

    python benchmarks/figures.py           # what differs (then exit code 1); counts of the others
    python benchmarks/figures.py --open    # also where the figures without a source stand
    python benchmarks/figures.py --older   # result files whose code has changed since
    python benchmarks/figures.py --write   # says so in the pages of those files

A table is compared with what its benchmark's script makes of the result file
(`figures/expected.py`). Prose names the source of its figures in a comment behind them:

    It takes 1.2 to 1.3 s.
    <!-- figures: runtime/results.json data-parallel: min(ours_s); max(ours_s) -->

The expressions (`figures/expressions.py`), here of a part of the file, find the numbers of the
paragraph before them, in that order, each rounded as it stands there. What has no result file says
why:

    <!-- stated: setting -->       a choice, an aim or a limit, not a result; or plain arithmetic
    <!-- stated: source -->        others have published it, and the page cites them
    <!-- stated: no file -->       measured by us, and not recorded
    <!-- stated: tests/... -->     a test or a script holds it

It counts for the paragraph before it; `stated below` for the section that follows.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "figures"))

from ages import aged, older
from expected import EXPECTED, expected
from expressions import part_of, value_of
from results import ROOT, results

__all__ = ["PAGES", "Checked", "checked", "read"]

PAGES = (
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
    *(name for name in EXPECTED if name.startswith("benchmarks/")),
)
COUNTED = re.compile(r"README\.md|docs/(benchmarks/.*|comparison\.md|index\.md|how-it-works/.*)")
"""Pages whose figures without a source are counted."""

NUMBER = re.compile(
    r"(?<![\w.:,-])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\.?\d|[-:]\d|[A-WYZa-wyz_])"
)
UNIT = re.compile(
    r"(?:(?: to|,? and|,? or|,) [-+]?\d[\d.,]*(?=[^\d.,]))*\**\s?"
    r"(?:%|(?:x|s|ms|us|ns|times|[kMGT]i?B|[MG]b/s|(?:GB|samples|tokens)/s|seconds|minutes|hours)\b)"
)
"""The unit of a number, or of the last of several."""
NAMED = re.compile(
    r"(?:[Tt]orch|[Pp]ython|[Tt]ransformers|CUDA|OR-Tools|DeepSpeed|glibc|numba|arXiv|Llama|"
    r"[Vv]ersion|[Ss]ections?)\S* (?:from |is )*$"
)
"""What stands before the number of a version or a section."""
COMMENT = re.compile(r"<!-- (figures|stated|stated below): (.*?) -->", re.DOTALL)
NO_PROSE = re.compile(
    r"^ *```.*?^ *```|`[^`\n]*`|\]\([^)\s]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE
)
BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.) )|^\|.*?$|^#.*?$", re.MULTILINE)
REASONS = ("setting", "source", "no file")

Span = tuple[int, int]


@dataclass(frozen=True)
class Checked:
    """A page's figures: what differs from its file, where they stand, which have no source."""

    differs: tuple[str, ...]
    figures: tuple[Span, ...]
    stated: Counter[str]
    open: tuple[Span, ...]


def read(page: str) -> str:
    """The text of a page of `PAGES`."""
    return (ROOT / page).read_text(encoding="utf-8")


def checked(page: str, text: str) -> Checked:
    """The figures of ``text``, which is that of ``page`` or a changed one."""
    prose = NO_PROSE.sub(lambda found: " " * len(found[0]), text)
    numbers = [found.span() for found in NUMBER.finditer(prose)]
    differs: list[str] = []
    known: set[Span] = set()
    for block in expected(page):
        places = list(places_of(block, text))
        differs += [] if places else [f"{page}: not as its file says: {first_missing(block, text)}"]
        known |= {each.span() for place in places for each in NUMBER.finditer(text, *place)}
    stated: dict[Span, str] = {}
    last = 0
    for comment in COMMENT.finditer(text):
        kind, says = comment[1], " ".join(comment[2].split())
        place = reach(kind, text, comment)
        here = [span for span in numbers if is_within(span, place)]
        if kind == "figures":
            here = [span for span in here if span[0] >= last]
            found, words = figures_of(says, text, here, prose)
            known |= set(found)
            last = max((end for _, end in found), default=last)
            differs += [f"{page}, line {text.count(chr(10), 0, comment.start()) + 1}: {words}"] * (
                words != ""
            )
        elif says in REASONS or (ROOT / says).exists():
            stated |= dict.fromkeys(here, says)
        else:
            differs.append(f"{page}: {says} is no reason and no file")
    rest = [span for span in numbers if span not in known and is_figure(prose, span)]
    return Checked(
        tuple(differs),
        tuple(sorted(known)),
        Counter(stated[span] for span in rest if span in stated),
        tuple(span for span in rest if span not in stated),
    )


def places_of(block: str, text: str) -> Iterator[Span]:
    """Where a text stands, however its lines are broken."""
    if "\n" in block and (start := text.find(block)) >= 0:
        return iter([(start, start + len(block))])
    words = r"\s+".join(map(re.escape, block.split()))
    return (found.span() for found in re.finditer(words, text))


def first_missing(block: str, text: str) -> str:
    """The first line of a block that is not in the text."""
    missing = (line for line in block.splitlines() if not any(places_of(line, text)))
    return next(missing, block.splitlines()[0])


def reach(kind: str, text: str, comment: re.Match[str]) -> Span:
    """The part of the page that a comment is about."""
    if kind == "stated below":
        heading = re.compile(r"^#", re.MULTILINE).search(text, comment.end())
        return comment.end(), heading.start() if heading else len(text)
    starts = (found.end() for found in BLOCK.finditer(text, 0, comment.start()))
    return max(starts, default=0), comment.start()


def figures_of(says: str, text: str, here: list[Span], prose: str) -> tuple[list[Span], str]:
    """The numbers that the expressions of a comment find, and why one finds none."""
    source, _, expressions = says.partition(": ")
    name, _, part = source.partition(" ")
    found: list[Span] = []
    for expression in expressions.split("; "):
        try:
            value = value_of(expression, part_of(part, results(name)))
        except (OSError, ValueError) as cause:
            return found, str(cause)
        span = next((s for s in here if reads(s, value, prose)), None)
        if span is None:
            told = ", ".join(text[slice(*each)] for each in here)
            return found, f"{expression} of {name} is {value:.6g}, and the page has {told}"
        found.append(span)
        here = here[here.index(span) + 1 :]
    return found, ""


def reads(span: Span, value: float, prose: str) -> bool:
    """Whether a number of a page is ``value``, rounded as it stands there.

    Only a count may be a number without unit and decimals: rounded, too many values would do.
    """
    token = prose[slice(*span)]
    if value != round(value) and not is_figure(prose, span):
        return False
    digits = len(token.partition(".")[2])
    sign = "+" if token[0] in "+-" else ""
    return f"{value:{sign}.{digits}f}" == token.replace(",", "")


def is_within(span: Span, place: Span) -> bool:
    return place[0] <= span[0] and span[1] <= place[1]


def is_figure(prose: str, span: Span) -> bool:
    """Whether a number has a unit or decimals, and is not that of a version."""
    start, end = span
    with_unit = UNIT.match(prose, end) is not None or "." in prose[start:end]
    return with_unit and NAMED.search(prose, max(0, start - 20), start) is None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--open", action="store_true", help="show figures without a source")
    parser.add_argument("--older", action="store_true", help="show what is older than its code")
    parser.add_argument("--write", action="store_true", help="say it in the pages")
    options = parser.parse_args()
    if options.older:
        print("\n".join(older()))
        return 0
    if options.write:
        for page in PAGES:
            (ROOT / page).write_text(aged(page, read(page)), encoding="utf-8")
    differs: list[str] = []
    counts: Counter[str] = Counter()
    for page in PAGES:
        text = read(page)
        found = checked(page, text)
        differs += found.differs
        differs += [f"{page}: run with --write"] * (aged(page, text) != text)
        counts += Counter(checked=len(found.figures)) + found.stated
        if not COUNTED.fullmatch(page):
            continue
        counts["without a source"] += len(found.open)
        if found.open:
            print(f"{len(found.open):5} without a source in {page}")
        for start, end in found.open if options.open else ():
            line = text.count("\n", 0, start) + 1
            around = text[max(0, start - 40) : end + 15]
            print(f"      {page}:{line}: ...{' '.join(around.split())}")
    print("\n".join([*differs, ", ".join(f"{count} {what}" for what, count in counts.items())]))
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
