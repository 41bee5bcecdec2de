"""The tables of docs/benchmarks/models.md, made from the results."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["GOOD", "counted", "filled_in", "parts"]

Row = Mapping[str, Any]

GOOD = ("right", "right as gradient accumulation")
OUTCOMES = (*GOOD, "refused", "WRONG", "crash", "timeout", "out of memory", "does not run eagerly")
HEADS = {
    "causal": "causal language models",
    "masked": "masked language models",
    "seq2seq": "sequence to sequence",
    "image": "image classification",
    "speech": "speech to text",
    "ctc": "speech with CTC",
    "vision": "pictures and text",
    "torchvision": "torchvision",
    "timm": "timm",
}
REASON_LENGTH = 220


def counted(rows: Iterable[Row]) -> tuple[int, int]:
    """How many models run eagerly, and how many of these are captured, cut and right."""
    judged = [row for row in rows if row["outcome"] != "does not run eagerly"]
    return len(judged), sum(row["outcome"] in GOOD for row in judged)


def parts(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """The generated parts of the page by name."""
    rows: Sequence[Row] = document["rows"]
    return {
        "counts": count_table(rows),
        "others": reason_table([r for r in rows if r["outcome"] in OUTCOMES[2:-1]]),
        "torch": torch_table(document.get("torch", []), rows),
        "rows": row_table([r for r in rows if r["outcome"] in GOOD]),
        "not judged": reason_table([r for r in rows if r["outcome"] == OUTCOMES[-1]]),
    }


def count_table(rows: Sequence[Row]) -> list[str]:
    """Rows: kinds of models. Columns: outcomes."""
    lines = [
        "| registered as | " + " | ".join(OUTCOMES) + " | right of those that run |",
        "|---" * (len(OUTCOMES) + 2) + "|",
    ]
    for head, words in HEADS.items():
        own = [row for row in rows if row["head"] == head]
        if own:
            lines.append(count_line(words, own))
    return [*lines, count_line("**together**", rows)]


def count_line(words: str, rows: Sequence[Row]) -> str:
    """One line of the table of counts."""
    found = Counter(row["outcome"] for row in rows)
    judged, good = counted(rows)
    share = f"{100 * good / judged:.1f} %" if judged else "-"
    return f"| {words} | " + " | ".join(str(found[o]) for o in OUTCOMES) + f" | {share} |"


def reason_table(rows: Iterable[Row]) -> list[str]:
    """Names, outcomes and reasons."""
    lines = ["| model | outcome | reason | judged |", "|---|---|---|---|"]
    for row in rows:
        reason = plain(row.get("reason", ""))
        lines.append(
            f"| `{row['name']}` | {row['outcome']} | {reason} | {row['date']}, {row['commit']} |"
        )
    return lines


def plain(reason: str) -> str:
    """A reason without the folders of the machine, short, and fit for a table."""
    text = re.sub(r"/\S*/site-packages/", "", " ".join(reason.split()))
    text = text.replace("|", "/").replace("`", "'").replace("<", "&lt;").replace("*", "\\*")
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."


def row_table(rows: Iterable[Row]) -> list[str]:
    """The models that are right, those of one kind of batch in a line, with the worst of them."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        mark = " (accumulation)" if "accumulation_error" in row else ""
        judged = f"{row['date']}, {row['commit']}"
        groups[row["batch"], row["dtype"] + mark, judged].append(row)
    lines = [
        "| batch | type | models | layers | largest error | capture s, at most | judged |",
        "|---|---|---|---|---|---|---|",
    ]
    for (batch, kind, judged), own in groups.items():
        names = ", ".join(f"`{row['name']}`" for row in own)
        error = max(row.get("accumulation_error", row["error"]) for row in own)
        layers = sorted({row["layers"] for row in own})
        span = str(layers[0]) if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        longest_s = max(row["capture_s"] for row in own)
        lines.append(
            f"| {batch} | {kind} | {len(own)}: {names} | {span} | {error:.0e} | "
            f"{longest_s:.1f} | {judged} |"
        )
    return lines


def torch_table(rows: Iterable[Row], ours: Iterable[Row]) -> list[str]:
    """Torch's own front end beside ours."""
    outcomes = {row["name"]: row["outcome"] for row in ours}
    lines = [
        "| model | Penstock | torch: splits | torch: runs | torch: gradients as they come | "
        "after summing tied copies |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.get(key, "-") for key in ("splits", "runs", "as_they_come", "summed")]
        cells = [outcomes.get(row["name"], "-"), *map(plain, cells)]
        lines.append(f"| `{row['name']}` | " + " | ".join(cells) + " |")
    return lines


def filled_in(text: str, document: Mapping[str, Any]) -> str:
    """The page with its generated parts renewed; they stand between comments that name them."""
    for name, lines in parts(document).items():
        block = f"<!-- {name} -->\n" + "\n".join(lines) + f"\n<!-- end of {name} -->"
        pattern = re.compile(f"<!-- {name} -->\n.*?<!-- end of {name} -->", re.DOTALL)
        text = pattern.sub(lambda _, block=block: block, text)
    judged, good = counted(document["rows"])
    own = [row for row in document["rows"] if row["head"] not in ("torchvision", "timm")]
    sentence = (
        f"{len(own)} of the {document['machine']['registered']} registered classes have been "
        f"judged so far; {judged} models run eagerly, of which {good} "
        f"({100 * good / judged:.1f} %) are captured, cut and right."
    )
    return re.sub(
        r"^\d+ of the .*? right\.$", sentence, text, count=1, flags=re.DOTALL | re.MULTILINE
    )
