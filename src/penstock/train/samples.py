"""Batches of datasets, loaders and files of text; and models that take arguments.

A job file names a dataset where it would name a function of batches (`Data`). Which samples a step
gets depends only on the job's seed and the number of the step, so a resumed run continues exactly
where it was. One epoch follows another without a gap, so every batch of the training is full.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from penstock.capture.contract import Batch
from penstock.errors import BadInput
from penstock.files import read_config
from penstock.train.job import CALLS, Data, Split, check_call, member_at

HELD_OUT = 0.1
"""The share of a dataset that is held out by default."""

HELD_OUT_NAMES = ("validation", "valid", "test", "eval")
"""Names of the held-out part of a dataset of several parts; the first that exists counts."""

LAYERS = "num_hidden_layers"

BYTES = 256
"""Tokens of text without a tokenizer: its bytes."""


@dataclass(frozen=True)
class ModelOfArguments:
    """The model ``place`` (``module:Class``), built with ``arguments``.

    A class of transformers takes them as keys of its configuration. ``config`` is then a file or
    directory of one, in which the other arguments change keys. Only ``dtype`` is no such key: it is
    the type of the weights.
    """

    place: str
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        kind = member_at(self.place)
        if is_auto(kind) or hasattr(kind, "config_class"):
            return
        try:
            inspect.signature(kind).bind(**self.arguments)
        except TypeError as problem:
            own = ", ".join(inspect.signature(kind).parameters)
            raise ValueError(
                f"'{self.place}' takes ({own}), and model_arguments has "
                f"({', '.join(self.arguments)}): {problem}"
            ) from None

    def __call__(self) -> nn.Module:
        kind = member_at(self.place)
        own = None if is_auto(kind) else getattr(kind, "config_class", None)
        if own is None and not is_auto(kind):
            return kind(**self.arguments)
        arguments = dict(self.arguments)
        # A configuration names the type of published weights; a training has its own.
        dtype = type_named(arguments.pop("dtype", "float32"))
        config = configuration(own, arguments)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return kind.from_config(config, dtype=dtype) if is_auto(kind) else kind(config)
        finally:
            torch.set_default_dtype(usual)


TYPES = ("float32", "bfloat16", "float16")
"""The types that the weights of a training may have."""


def type_named(name: object) -> torch.dtype:
    """The type of weights that a job names."""
    if name not in TYPES:
        raise BadInput(f"model_arguments.dtype is {name!r}; use one of {', '.join(TYPES)}")
    return getattr(torch, str(name))


def is_auto(kind: Any) -> bool:
    """Return whether a class of transformers is a proxy for that of any configuration."""
    is_class = inspect.isclass(kind) and not issubclass(kind, nn.Module)
    return is_class and hasattr(kind, "from_config")


def configuration(kind: Any, arguments: Mapping[str, Any]) -> Any:
    """A configuration of transformers: of a file, if one is named, and with these keys.

    ``kind`` is its class; None for a model that any configuration makes.
    """
    from transformers import AutoConfig

    keys = dict(arguments)
    place, name = keys.pop("config", None), keys.pop("model_type", None)
    own: dict[str, Any] = {}
    if place is not None:
        own = dict(read_config(place))
        name = name or own.get("model_type")
    if kind is None:
        if not isinstance(name, str):
            raise BadInput(
                "model_arguments name neither config, a file, nor model_type, which an Auto class "
                "needs; add one, or name the model's own class"
            )
        kind = type(AutoConfig.for_model(name))
    known = kind().to_dict()
    for key in keys:
        if key not in known and key not in own:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "see its documentation"
            raise BadInput(f"model_arguments.{key} is no key of {kind.__name__}; {hint}")
    if (layers := own.get(LAYERS)) != keys.get(LAYERS, layers):
        # What is said of each layer is said of others; a configuration derives it again.
        own = {k: v for k, v in own.items() if not (isinstance(v, list) and len(v) == layers)}
    return kind(**own | keys)


def data_named(
    place: str, arguments: Mapping[str, Any], held_out: float | str | None, collate: str | None
) -> Data:
    """The batches of ``place``: a function as a job has it, or a dataset (`SampleData`)."""
    found = member_at(place)
    if is_dataset(found) or makes_dataset(found, place, arguments):
        return SampleData(place, arguments, HELD_OUT if held_out is None else held_out, collate)
    given = {"data_arguments": arguments or None, "held_out": held_out, "collate": collate}
    for key in (key for key, value in given.items() if value is not None):
        raise ValueError(
            f"'{place}' is a function of {', '.join(CALLS['data'])}, which yields batches of "
            f"either split itself; leave {key} out"
        )
    return found


def makes_dataset(found: Any, place: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a class or function makes a dataset of ``arguments``, and is no `Data`."""
    try:
        inspect.signature(found).bind(**arguments)
        fits = True
    except (TypeError, ValueError) as problem:
        if inspect.isclass(found):
            own = ", ".join(inspect.signature(found).parameters)
            raise ValueError(
                f"'{place}' takes ({own}): {problem}; give them as a table, [data_arguments]"
            ) from None
        fits = False
    if not fits or not (inspect.isclass(found) or arguments):
        try:
            check_call(found, "data")
            return False
        except ValueError:
            if not fits:
                raise
    return True


def is_dataset(found: Any) -> bool:
    """Return whether samples can be taken from an object: by number or one after another."""
    return not inspect.isclass(found) and (
        hasattr(found, "__getitem__") or hasattr(found, "__iter__")
    )


@dataclass(frozen=True)
class SampleData:
    """The batches of a dataset, as a job's ``data``.

    ``place`` names a dataset by number or by iteration (also of ``datasets``, also of several
    parts), a ``DataLoader``, or a function or class that makes one with ``arguments``. ``held_out``
    is the share of samples that the training does not see, or the place of another dataset, which
    it needs where samples have no numbers. Samples become batches by ``collate``, else by the
    loader's own function, else torch's.
    """

    place: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    held_out: float | str = HELD_OUT
    collate: str | None = None

    def __post_init__(self) -> None:
        member_at(self.place)
        if isinstance(self.held_out, str):
            member_at(self.held_out)
        elif not 0 <= self.held_out < 1:
            raise ValueError(
                f"held_out is {self.held_out}; give a share of at least 0 and below 1, or the "
                f"place of a dataset"
            )
        if self.collate is not None and not callable(member_at(self.collate)):
            raise ValueError(f"collate '{self.collate}' is no function")

    def __getstate__(self) -> dict[str, Any]:
        # Each process reads its own samples.
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __call__(
        self, split: Split, seed: int, start_step: int, batch_size: int
    ) -> Iterator[Batch]:
        training, held_out = self.parts
        part = training if split == "train" else held_out
        if part is None:
            return iter(())
        return part.batches(split, seed, start_step, batch_size)

    @cached_property
    def parts(self) -> "tuple[Samples, Samples | None]":
        """The samples of the training, and those that are held out."""
        return self.divided(made(self.place, self.arguments))

    def divided(self, found: Any) -> "tuple[Samples, Samples | None]":
        """The samples of a dataset, and those of its part that is held out."""
        own = member_at(self.collate) if self.collate else None
        if isinstance(self.held_out, str):
            other = all_samples(made(self.held_out, {}), own, self.held_out)
            return all_samples(found, own, self.place), other
        if isinstance(found, Mapping) and "train" in found:
            parts = cast("Mapping[str, Any]", found)
            name = next((name for name in HELD_OUT_NAMES if name in parts), None)
            if name is not None:
                other = all_samples(parts[name], own, self.place)
                return all_samples(parts["train"], own, self.place), other
            found = parts["train"]
        whole = all_samples(found, own, self.place)
        if self.held_out == 0:
            return whole, None
        if not whole.numbered:
            raise BadInput(
                f"data '{self.place}' has no length, so a share of it cannot be held out; name "
                f'another dataset as held_out = "module:dataset", or set held_out = 0'
            )
        total = len(whole.dataset)
        kept = min(total - 1, math.ceil(self.held_out * total))
        order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).tolist()
        seen, unseen = sorted(order[kept:]), sorted(order[:kept])
        return whole.only(seen), whole.only(unseen) if unseen else None


def made(place: str, arguments: Mapping[str, Any]) -> Any:
    """The dataset at a place, which its function or class makes with ``arguments``."""
    found = member_at(place)
    if is_dataset(found):
        if arguments:
            raise BadInput(f"data_arguments are for a function or class, and '{place}' is neither")
        return found
    dataset = found(**arguments)
    if not is_dataset(dataset):
        raise BadInput(
            f"'{place}' returned {type(dataset).__name__}, from which no samples can be taken; "
            f"return a dataset or a DataLoader"
        )
    return dataset


@dataclass(frozen=True)
class Samples:
    """Samples of a dataset, by their numbers or as iteration yields them.

    ``batched``: iteration yields whole batches.
    """

    place: str
    dataset: Any
    collate: Callable[[list[Any]], Batch]
    numbered: bool = False
    shuffled: bool = True
    batched: bool = False
    workers: int = 0

    def __post_init__(self) -> None:
        if self.numbered and not len(self.dataset):
            raise BadInput(f"data '{self.place}' has 0 samples; a training needs at least one")

    def only(self, numbers: list[int]) -> "Samples":
        """Fewer samples of the same dataset."""
        return replace(self, dataset=Subset(self.dataset, numbers))

    def batches(self, split: Split, seed: int, start_step: int, batch_size: int) -> Iterator[Batch]:
        """Batches from a step on; those of the held-out part end."""
        training, start = split == "train", start_step * batch_size
        if self.numbered:
            numbers = self.order(seed, start) if training else iter(range(start, len(self.dataset)))
            loader = DataLoader[Any](
                self.dataset,
                batch_sampler=item_lists(numbers, batch_size),
                collate_fn=self.collate,
                num_workers=self.workers,
            )
            return iter(loader)
        epochs = count() if training else range(1)
        ready = (one for epoch in epochs for one in self.epoch(seed, epoch))
        if not self.batched:
            return map(self.collate, item_lists(islice(ready, start, None), batch_size))
        own = getattr(self.dataset, "batch_size", None) or batch_size
        if own != batch_size:
            raise BadInput(
                f"data '{self.place}' has batches of {own}, and the job's batch_size is "
                f"{batch_size}; make them equal"
            )
        return islice(ready, start_step, None)

    def order(self, seed: int, start: int = 0) -> Iterator[int]:
        """The endless numbers of samples, epoch after epoch, from the one at ``start`` on."""
        total = len(self.dataset)
        for epoch in count(start // total):
            order = range(total)
            if self.shuffled:
                generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
                order = torch.randperm(total, generator=generator).tolist()
            yield from order[start % total if epoch == start // total else 0 :]

    def epoch(self, seed: int, epoch: int) -> Iterator[Any]:
        """The samples of one iteration over the dataset; equal for equal ``seed`` and ``epoch``."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + epoch)
            iterator = iter(self.dataset)
        empty = True
        for sample in iterator:
            empty = False
            yield sample
        if empty:
            raise BadInput(f"data '{self.place}' yields nothing; a dataset has at least one sample")


def item_lists(items: Iterator[Any], size: int) -> BatchSampler:
    """Lists of ``size`` items, once; the last may be shorter."""
    return BatchSampler(cast(Any, items), size, drop_last=False)


def all_samples(found: Any, collate: Callable[[list[Any]], Batch] | None, place: str) -> Samples:
    """The samples of a dataset or a loader."""
    if isinstance(found, DataLoader):
        loader = cast("DataLoader[Any]", found)
        own = collate or loader.collate_fn
        usual = isinstance(loader.sampler, RandomSampler | SequentialSampler)
        if usual and hasattr(loader.dataset, "__len__"):
            shuffled = isinstance(loader.sampler, RandomSampler)
            return Samples(place, loader.dataset, own, True, shuffled, workers=loader.num_workers)
        return Samples(place, loader, own, batched=True)
    if hasattr(found, "with_format") and getattr(found, "format", {}).get("type", "") is None:
        found = found.with_format("torch")
    numbered = hasattr(found, "__len__") and hasattr(found, "__getitem__")
    return Samples(place, found, collate or default_collate, numbered)


class TextWindows:
    """Windows of text that follow one another, ``length`` tokens and the one after them.

    Each is ``(tokens, next tokens)``, or where the model computes its ``own_loss`` the keywords
    ``input_ids`` and ``labels``, which are the same tokens, as classes of transformers take them.
    """

    def __init__(self, tokens: torch.Tensor, length: int, own_loss: bool) -> None:
        self._tokens, self._length, self._own_loss = tokens, length, own_loss

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, number: int) -> Batch:
        start = number * self._length
        window = self._tokens[start : start + self._length + 1].long()
        if self._own_loss:
            return {"input_ids": window[:-1], "labels": window[:-1].clone()}
        return window[:-1], window[1:].clone()


@dataclass(frozen=True)
class TextData(SampleData):
    """The batches of files of text, as a job's ``data``.

    ``place`` is a file, or a directory, of which all files ``*.txt`` and ``*.md`` are read; empty
    where only estimates are made. ``tokenizer`` is a file as the package tokenizers writes it;
    without one, bytes are tokens. ``shape_only``: no text is read, and all tokens are zeros.
    """

    tokenizer: str = ""
    length: int = 128
    own_loss: bool = False
    shape_only: bool = False

    def __post_init__(self) -> None:
        for place in filter(None, (self.place, self.tokenizer)):
            if not Path(place).exists():
                raise ValueError(f"'{place}' does not exist; name a file beside the job's")
        if self.length < 1:
            raise ValueError(f"text.length is {self.length}; give at least 1 token")

    @cached_property
    def parts(self) -> tuple[Samples, Samples | None]:
        return self.divided(self.windows())

    @property
    def vocabulary(self) -> int:
        """The number of different tokens."""
        return self._tokenizer.get_vocab_size() if self.tokenizer else BYTES

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise BadInput(
                "text.tokenizer needs the package tokenizers; run 'pip install tokenizers', or "
                "leave it out, and bytes are the tokens"
            ) from None
        try:
            return Tokenizer.from_file(self.tokenizer)
        except Exception as cause:  # the package raises plain exceptions
            raise BadInput(
                f"tokenizer '{self.tokenizer}' cannot be read: {cause}; name a tokenizer.json"
            ) from None

    def windows(self) -> TextWindows:
        """All windows of the text."""
        if self.shape_only:
            return TextWindows(torch.zeros(3 * self.length + 1), self.length, self.own_loss)
        if not self.place:
            raise BadInput(
                "the text has a length and no path, which is enough for 'penstock profile "
                "--estimate'; to train, name a file or directory as text.path"
            )
        place = Path(self.place)
        files = [place]
        if place.is_dir():
            files = sorted(p for p in place.rglob("*") if p.suffix in (".txt", ".md"))
        found: list[torch.Tensor] = []
        for file in files:
            data = file.read_bytes()
            if self.tokenizer:
                try:
                    text = data.decode()
                except UnicodeDecodeError as cause:
                    raise BadInput(f"text '{file}' is not UTF-8: {cause}; convert it") from None
                found.append(torch.tensor(self._tokenizer.encode(text).ids, dtype=torch.int32))
            elif data:
                found.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        tokens = torch.cat(found) if found else torch.empty(0, dtype=torch.uint8)
        if len(tokens) <= 2 * self.length:
            raise BadInput(
                f"text '{self.place}' has {len(tokens)} tokens, and two windows of {self.length} "
                f"are the least; add text or set text.length lower"
            )
        return TextWindows(tokens, self.length, self.own_loss)


def next_token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next tokens, in nats; ``logits`` end in the vocabulary."""
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())
