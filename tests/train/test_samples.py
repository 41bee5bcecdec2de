"""Datasets, loaders and text as a job's data: every sample once an epoch, and exact resuming."""

import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import BadInput
from penstock.train.job import Job
from penstock.train.job_file import find_job
from penstock.train.profile_job import built_model

MODULE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

numbers = torch.arange(50)
numbered = TensorDataset(numbers.float(), numbers)
shuffled = DataLoader(numbered, batch_size=3, shuffle=True)
in_order = DataLoader(numbered, batch_size=8)
parts = {"train": TensorDataset(numbers[:40].float(), numbers[:40]),
         "test": TensorDataset(numbers[40:].float(), numbers[40:])}
doubled = lambda samples: tuple(2 * torch.stack(part) for part in zip(*samples))


class Made(Dataset):
    def __init__(self, size, offset=0):
        self.size, self.offset = size, offset

    def __len__(self):
        return self.size

    def __getitem__(self, place):
        return torch.tensor(float(place + self.offset)), place + self.offset


class Streamed(IterableDataset):
    def __iter__(self):
        yield from numbered


streamed = Streamed()
streams = DataLoader(streamed, batch_size=8)
fours = DataLoader(streamed, batch_size=4)
epochs = []


class Told(IterableDataset):
    def set_epoch(self, epoch):
        epochs.append(epoch)

    def __iter__(self):
        yield from numbered


told = Told()
empty = TensorDataset(numbers[:0])


def one():
    return 1


def whole(split, seed, start_step, batch_size):
    while True:
        yield torch.zeros(batch_size), torch.zeros(batch_size)


def loads(split, seed, start_step, batch_size):
    return in_order


def build(width=4):
    return nn.Linear(1, width)
"""


@pytest.fixture
def job_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Makes a job of the module's model and these keys, written as TOML."""
    (tmp_path / "samples_under_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def make(*keys: str) -> Job:
        given = " ".join(keys)
        model = [] if "model =" in given else ['model = "samples_under_test:build"']
        loss = [] if "loss =" in given else ['loss = "torch.nn.functional:mse_loss"']
        path = tmp_path / "job.toml"
        path.write_text("\n".join([*model, *loss, "batch_size = 8", *keys]))
        return find_job(path)

    return make


def named(name: str) -> str:
    return f'data = "samples_under_test:{name}"'


def seen(batches: Iterator[Any], count: int | None = None) -> list[list[int]]:
    return [batch[1].tolist() for batch in islice(batches, count)]


@pytest.mark.parametrize(
    "keys",
    [
        (named("numbered"),),
        (named("shuffled"),),
        (named("in_order"),),
        (named("Made"), "data_arguments = { size = 30, offset = 5 }"),
        (named("streamed"), "held_out = 0"),
        (named("streams"), 'held_out = "samples_under_test:numbered"'),
        (named("parts"),),
    ],
)
def test_a_resumed_run_gets_the_samples_that_it_would_have_got(
    job_of: Callable[..., Job], keys: tuple[str, ...]
) -> None:
    job = job_of(*keys)
    whole = seen(job.batches("train"), 15)
    assert all(len(batch) == 8 for batch in whole) or keys[0] == named("streams")
    for start in (1, 5, 6, 13):
        assert seen(job.batches("train", start), 15 - start) == whole[start:]
    # Workers get the job pickled, without the samples that this process has read.
    assert seen(pickle.loads(pickle.dumps(job)).batches("train"), 15) == whole


def test_an_epoch_has_every_sample_once_and_none_that_is_held_out(
    job_of: Callable[..., Job],
) -> None:
    job = job_of(named("numbered"), "held_out = 0.2")
    held_out = [one for batch in seen(job.batches("held-out")) for one in batch]
    trained = [one for batch in seen(job.batches("train"), 10) for one in batch]
    assert len(held_out) == 10
    for epoch in (trained[:40], trained[40:]):
        assert sorted(epoch + held_out) == list(range(50))
    assert trained[:40] != trained[40:]
    assert trained[:40] != sorted(trained[:40])
    again = job_of(named("numbered"), "held_out = 0.2", "seed = 1")
    assert seen(again.batches("train"), 5) != seen(job.batches("train"), 5)
    assert seen(again.batches("held-out")) == seen(job.batches("held-out"))


def test_a_loader_that_does_not_shuffle_keeps_its_order(job_of: Callable[..., Job]) -> None:
    job = job_of(named("in_order"), "held_out = 0")
    assert seen(job.batches("train"), 7)[:6] == [list(range(n, n + 8)) for n in range(0, 48, 8)]
    # The seventh batch goes on in the next epoch.
    assert seen(job.batches("train"), 7)[6] == [48, 49, 0, 1, 2, 3, 4, 5]
    assert seen(job.batches("held-out")) == []


def test_parts_of_a_dataset_are_taken_as_they_are(job_of: Callable[..., Job]) -> None:
    job = job_of(named("parts"))
    held_out = [one for batch in seen(job.batches("held-out")) for one in batch]
    assert held_out == list(range(40, 50))
    assert max(max(batch) for batch in seen(job.batches("train"), 10)) == 39


def test_samples_become_a_batch_by_the_job_s_function(job_of: Callable[..., Job]) -> None:
    job = job_of(named("in_order"), "held_out = 0", 'collate = "samples_under_test:doubled"')
    assert seen(job.batches("train"), 1) == [[0, 2, 4, 6, 8, 10, 12, 14]]


def test_a_stream_is_told_of_each_epoch(job_of: Callable[..., Job]) -> None:
    import samples_under_test

    samples_under_test.epochs.clear()
    seen(job_of(named("told"), "held_out = 0").batches("train"), 13)
    assert samples_under_test.epochs == [0, 1, 2]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ((named("Made"),), "[data_arguments]"),
        ((named("Made"), "data_arguments = { sise = 3 }"), "takes (size, offset)"),
        ((named("numbered"), "data_arguments = { size = 3 }"), "is neither"),
        ((named("numberd"),), "did you mean 'numbered'?"),
        ((named("streamed"),), "has no length"),
        ((named("numbered"), "held_out = 1.5"), "held_out is 1.5"),
        ((named("numbered"), "held_out = true"), "held_out"),
        ((named("empty"),), "has 0 samples"),
        ((named("one"),), "returned int"),
        ((named("whole"), "held_out = 0.2"), "leave held_out out"),
        ((named("loads"),), "returns a DataLoader"),
        ((named("fours"), "held_out = 0"), "has batches of 4"),
        ((named("numbered"), "model_arguments = { wide = 3 }"), "takes (width)"),
        (('text = "absent.txt"',), "does not exist"),
        (('text = "samples_under_test.py"', named("numbered")), "in place of data"),
        (('text = { path = "samples_under_test.py", lenght = 3 }',), "did you mean 'length'?"),
        (('text = { path = "samples_under_test.py", length = 9999 }',), "two windows of 9999"),
        (
            ('text = { path = "samples_under_test.py", tokenizer = "samples_under_test.py" }',),
            "cannot be read",
        ),
    ],
)
def test_what_cannot_be_data_is_refused_in_a_line(
    job_of: Callable[..., Job], keys: tuple[str, ...], told: str
) -> None:
    with pytest.raises(BadInput) as refused:
        job = job_of(*keys)
        for split in ("held-out", "train"):
            next(job.batches(split), None)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_windows_of_bytes_follow_one_another(job_of: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    job = job_of('text = { path = "text.txt", length = 16 }', "held_out = 0")
    text = (tmp_path / "text.txt").read_bytes()
    windows = {text[start : start + 17] for start in range(0, len(text) - 16, 16)}
    for tokens, targets in islice(job.batches("train"), 6):
        for row, following in zip(tokens, targets, strict=True):
            assert bytes([*row.tolist(), following[-1].item()]) in windows
            assert torch.equal(row[1:], following[:-1])


def test_without_a_loss_the_model_gets_keywords_and_a_tokenizer_s_tokens(
    job_of: Callable[..., Job], tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(("to", "be", "or", "not"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="to"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    path = tmp_path / "llama.toml"
    path.write_text(
        'model = "transformers:LlamaForCausalLM"\n'
        "model_arguments = { hidden_size = 16, intermediate_size = 16, num_hidden_layers = 2, "
        "num_attention_heads = 2, num_key_value_heads = 2, vocab_size = 4 }\n"
        'text = { path = "text.txt", tokenizer = "tokenizer.json", length = 12 }\n'
        "batch_size = 2\nmicro_batch_sizes = [1]\n"
    )
    job = find_job(path)
    batch: Any = next(job.batches("train"))
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"][0].tolist() == [0, 1, 2, 3, 0, 1] * 2
    model = built_model(job)
    assert model.config.num_hidden_layers == 2
    assert torch.isfinite(model(**batch).loss)
    small = find_job(path, ["model_arguments.vocab_size=3"])
    with pytest.raises(BadInput, match="4 tokens, and the model's embedding has room for 3"):
        built_model(small)
    with pytest.raises(BadInput, match="did you mean 'num_hidden_layers'"):
        built_model(find_job(path, ["model_arguments.num_layers=3"]))


def test_a_configuration_s_file_and_keys_make_a_float32_model(
    job_of: Callable[..., Job], tmp_path: Path
) -> None:
    from transformers import Qwen3Config

    Qwen3Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        dtype="bfloat16",
    ).save_pretrained(tmp_path)
    for kind in ("Qwen3ForCausalLM", "AutoModelForCausalLM"):
        job = job_of(
            f'model = "transformers:{kind}"',
            'model_arguments = { config = "config.json", num_hidden_layers = 2 }',
            named("numbered"),
        )
        model = built_model(job)
        assert type(model).__name__ == "Qwen3ForCausalLM"
        assert len(model.model.layers) == 2
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_value_of_any_key_can_be_changed(job_of: Callable[..., Job], tmp_path: Path) -> None:
    job_of(named("numbered"), "[optimizer]", 'name = "sgd"')
    path = tmp_path / "job.toml"
    job = find_job(
        path,
        [
            "steps=7",
            "optimizer.learning_rate = 3e-2",
            "autocast=bfloat16",
            "model_arguments.width=6",
            "held_out=0",
        ],
    )
    assert (job.steps, job.autocast, job.optimizer.name) == (7, "bfloat16", "sgd")
    assert job.optimizer.learning_rate == 0.03
    linear = built_model(job)
    assert isinstance(linear, nn.Linear) and linear.out_features == 6
    assert find_job("gpt-text", ["steps=9"]).steps == 9
    for change, told in {
        "step=3": "did you mean 'steps'?",
        "steps": "is no key=value",
        "optimizer.rate=1": "unknown key 'rate'",
        "model.width=3": "model is no table",
        "steps=many": "steps",
    }.items():
        with pytest.raises(BadInput) as refused:
            find_job(path, [change])
        assert told in str(refused.value)
