"""Entries of a batch without tensors, such as file names, which the program must not read.

The program gets a placeholder for each of them. It may pass that on, compare it with None and
query its class. Any other use is noted and refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from penstock.capture.record.user_lines import line_in_words, line_of_user
from penstock.errors import BadInput

_OF_EVERY_CLASS = frozenset(
    [
        *("__new__", "__init__", "__del__", "__init_subclass__", "__subclasshook__"),
        *("__class__", "__getattribute__", "__getattr__", "__class_getitem__"),
    ]
)


class StandIn:
    """Placeholder for an entry; a subclass has the special methods of the entry's class."""


@dataclass(frozen=True)
class UnreadEntry:
    """The place of such an entry in the structure of a batch; ``value`` is that of the example.

    ``readers`` are the lines that have read its placeholder.
    """

    name: str
    value: Any = field(compare=False, repr=False)
    readers: list[str] = field(default_factory=list[str], compare=False, repr=False)

    @property
    def refusal(self) -> BadInput:
        """The error to raise where it is read."""
        return BadInput(
            f"{self.name} is a {type(self.value).__name__}, and {self.readers[-1]} reads it, but "
            f"of a batch only tensors are passed to every stage; let the loader give it as a "
            f"tensor with the samples first, or do not read it"
        )

    @cached_property
    def stand_in(self) -> Any:
        """The same object each time, so that runs of the program can be compared."""
        kind = type(self.value)

        def read(*_: Any, **__: Any) -> Any:
            self.readers.append(line_in_words(line_of_user()))
            raise self.refusal

        def attribute(_: Any, name: str) -> Any:
            if name == "__class__":
                return kind
            getattr(self.value, name)  # a query of what it does not have is no read
            return read()

        special: dict[str, Any] = {
            name: read
            for name in set(dir(kind)) - _OF_EVERY_CLASS
            if name[:2] == "__" == name[-2:] and callable(getattr(kind, name))
        }
        return type("StandIn", (StandIn,), special | {"__getattribute__": attribute})()


def is_plain(value: Any) -> bool:
    """Return whether an entry could be a constant of the program: a word, or one or more numbers.

    Several words are mostly one for each sample, so no micro-batch could have them all.
    """
    if isinstance(value, Mapping):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(is_plain(entry) and not isinstance(entry, str) for entry in value)
    return value is None or isinstance(value, bool | int | float | str)
