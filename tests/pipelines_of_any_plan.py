"""The `Pipeline` of tests that try plans for fewer devices on the workers of one launch."""

from dataclasses import replace
from typing import Any

from penstock.runtime import pipeline
from penstock.runtime.options import Safety


class Pipeline(pipeline.Pipeline):
    """A plan may leave workers idle."""

    def __init__(self, *given: Any, safety: Safety = Safety(), **named: Any) -> None:  # noqa: B008
        super().__init__(*given, safety=replace(safety, idle_ranks=True), **named)
