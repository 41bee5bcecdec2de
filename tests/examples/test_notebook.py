"""The notebook of the examples runs, and each cell shows a table or a picture."""

import ast
import json
from typing import Any

from scripts import ROOT

NOTEBOOK = json.loads((ROOT / "examples" / "plan_in_a_notebook.ipynb").read_text(encoding="utf-8"))


def shown_by(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; return the value of its last line."""
    tree = ast.parse(cell)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_every_cell_shows_a_table_or_a_picture() -> None:
    names: dict[str, Any] = {}
    cells = ["".join(c["source"]) for c in NOTEBOOK["cells"] if c["cell_type"] == "code"]
    shown = [shown_by(cell, names) for cell in cells]
    assert [type(value).__name__ for value in shown] == [
        *("ModelProfile", "Cluster", "Comparisons", "Plan", "Prediction"),
        *("LayerGraph", "ModelProfile", "Plan", "Prediction"),
    ]
    pages = [value._repr_html_() for value in shown]
    assert [page for page in pages if not page.startswith(("<table>", "<svg"))] == []
    assert [page.count("<svg") for page in pages] == [0, 0, 1, 0, 1, 0, 0, 0, 1]
    assert all(len(repr(value)) < 400 for value in shown)


def test_the_notebook_is_kept_without_outputs() -> None:
    assert not [c for c in NOTEBOOK["cells"] if c.get("outputs") or c.get("execution_count")]
