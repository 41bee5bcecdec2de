"""Job files are read whole, and every mistake in one gets a line that names the remedy."""

import importlib
import sys
from dataclasses import replace
from itertools import islice
from operator import concat
from pathlib import Path

import pytest
import torch

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.files import in_one_line
from penstock.runtime.tables import LossScaling, Weights
from penstock.train import DEFAULT_JOB, JOBS
from penstock.train.job import Job
from penstock.train.job_file import find_job
from penstock.train.optimizers import state_bytes_per_parameter_byte
from penstock.train.profile_job import built_model, measure_job
from penstock.train.training_loop import batches_of_steps

MODULE = """
import torch
from torch import nn

def build():
    return nn.Linear(4, 2)

def batches(split, seed, start_step, batch_size):
    while True:
        yield torch.zeros(batch_size, 4), torch.zeros(batch_size, dtype=torch.long)

losses = [(1.0, nn.functional.cross_entropy), (0.5, nn.functional.multi_margin_loss)]

def nothing(split, seed, start_step, batch_size):
    return iter(())

def leave():
    raise SystemExit(0)

def one():
    return 1

def doubled(batch):
    return batch

def doubles(split, seed, start_step, batch_size):
    yield torch.zeros(batch_size, 4).double(), torch.zeros(batch_size, dtype=torch.long)
"""

OWN = """
model = "job_under_test:build"
data = "job_under_test:batches"
loss = "torch.nn.functional:cross_entropy"
batch_size = 6
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job_under_test.py").write_text(MODULE)
    (tmp_path / "job_that_exits.py").write_text("raise SystemExit(3)")
    (tmp_path / "job_that_fails.py").write_text("1 / 0")
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", JOBS)
def test_every_built_in_job_is_found_by_its_name(name: str) -> None:
    job = find_job(name)
    assert job.name == name
    assert isinstance(job, Job)
    assert DEFAULT_JOB in JOBS


def test_a_job_of_ones_own_names_its_functions(folder: Path) -> None:
    text = OWN + 'steps = 7\n[optimizer]\nname = "sgd"\nlearning_rate = 0.5\n'
    job = find_job(written(folder, text))
    assert (job.name, job.steps, job.batch_size) == ("mine", 7, 6)
    assert (job.optimizer.name, job.optimizer.learning_rate) == ("sgd", 0.5)
    assert job.micro_batch_choices() == (6, 3, 2, 1)
    assert isinstance(job.model(), torch.nn.Linear)
    assert job.example_batch()[0].shape == (6, 4)
    assert job.loss is torch.nn.functional.cross_entropy


def test_a_loss_may_be_a_list_of_weighted_functions(folder: Path) -> None:
    text = OWN.replace("torch.nn.functional:cross_entropy", "job_under_test:losses")
    job = find_job(written(folder, text))
    assert isinstance(job.loss, list)
    graph = capture_model(job.model(), job.example_batch(), loss=job.loss)
    assert len(graph.batch_leaves(job.example_batch())) == 3


def test_a_variation_keeps_what_it_does_not_change(folder: Path) -> None:
    base = find_job("gpt-text")
    job = find_job(
        written(folder, 'base = "gpt-text"\nsteps = 5\n[optimizer]\nbetas = [0.8, 0.9]\n')
    )
    assert job.steps == 5
    assert job.optimizer.betas == (0.8, 0.9)
    assert job.optimizer.learning_rate == base.optimizer.learning_rate
    assert job.model is base.model
    assert job.micro_batch_sizes == base.micro_batch_sizes


def test_precision_sharding_and_accumulation_are_keys(folder: Path) -> None:
    text = (
        'base = "gpt-text"\nautocast = "float16"\naccumulate = 3\n'
        '[constraints]\nsharding = "optimizer"\n'
        "[loss_scaling]\ninitial = 1024.0\n"
        '[optimizer]\nname = "muon"\nforeach = true\n'
    )
    job = find_job(written(folder, text))
    assert job.autocast_dtype() == torch.float16
    assert (job.accumulate, job.shards_optimizer) == (3, True)
    assert job.loss_scaling == LossScaling(initial=1024.0)
    assert state_bytes_per_parameter_byte(job.optimizer) == 1.0
    assert (job.optimizer.fused, job.optimizer.foreach) == (False, True)


def test_a_module_beside_the_job_file_replaces_none_of_the_standard_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (folder / "colorsys.py").write_text("raise ImportError('beside the job')\n")
    find_job(written(folder, 'base = "gpt-text"\n'))
    assert str(folder) in sys.path
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)


def test_weights_lie_beside_the_job_file(folder: Path) -> None:
    (folder / "job.toml").write_text(OWN + 'weights = "first"\nsave_weights = "/last"\n')
    job = find_job(folder / "job.toml")
    assert job.weights == Weights(folder / "first")
    assert job.save_weights == Path("/last")
    quantised = '[weights]\ndirectory = "first"\nquantise = "operator:concat"\n'
    (folder / "job.toml").write_text(OWN + quantised)
    assert find_job(folder / "job.toml").weights == Weights(folder / "first", quantise=concat)
    (folder / "job.toml").write_text(OWN + quantised.replace("concat", "neg"))
    with pytest.raises(BadInput, match=r"is called as quantise\(name, weight\)"):
        find_job(folder / "job.toml")
    table = '[weights]\ndirectory = "first"\nnew = ["head.*"]\nunused = ["old.*"]\n'
    (folder / "job.toml").write_text(OWN + table)
    expected = Weights(folder / "first", ("head.*",), ("old.*",))
    assert find_job(folder / "job.toml").weights == expected


def test_a_step_takes_as_many_batches_as_the_job_accumulates(folder: Path) -> None:
    job = replace(find_job("gpt-text"), accumulate=2, steps=5)
    taken = list(batches_of_steps(job, 3))
    assert [len(batches) for batches in taken] == [2, 2]
    own = islice(job.batches("train", 6), 4)
    for batch, expected in zip((b for batches in taken for b in batches), own, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, expected, strict=True))


def test_another_batch_size_forgets_the_micro_batches_of_the_old_one(folder: Path) -> None:
    job = find_job(written(folder, 'base = "gpt-text"\nbatch_size = 6\n'))
    assert job.micro_batch_choices() == (6, 3, 2, 1)
    assert job.example_batch()[0].shape[0] == 6


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("steps = = 3\n", ["not valid TOML", "line 1"]),
        ('base = "gpt-text"\nstep = 3\n', ["unknown key 'step'", "did you mean 'steps'?"]),
        ('base = "gpt-txt"\n', ["base is 'gpt-txt'", "did you mean 'gpt-text'?"]),
        ('base = "gpt-text"\nautocast = "bf16"\n', ["autocast is 'bf16'", "bfloat16", "float16"]),
        (
            'base = "gpt-text"\n[optimizer]\nname = "lion"\n',
            ["optimizer.name is 'lion'", "adamw", "muon", "torch.optim:NAdam"],
        ),
        (
            'base = "gpt-text"\n[optimizer]\nfused = true\nforeach = true\n',
            ["both fused and foreach", "set one of them"],
        ),
        (
            'base = "gpt-text"\n[optimizer]\nschedule = "plateau"\n',
            ["no warm-up", "warm_up_steps = 0"],
        ),
        (
            'base = "gpt-text"\n[optimizer]\nfollows = "loss"\n',
            ['are for schedule = "plateau"', 'schedule is "cosine"'],
        ),
        (
            'base = "gpt-text"\n[optimizer]\nschedule = "plateau"\nwarm_up_steps = 0\n'
            "plateau = { factr = 0.5 }\n",
            ["optimizer.plateau", "factr", "factor = 0.5"],
        ),
        (
            'base = "gpt-text"\n[optimizer]\nschedule = "plateau"\nwarm_up_steps = 0\n'
            'follows = "evaluation_acuracy"\n',
            ["'evaluation_acuracy'", "'evaluation_loss'"],
        ),
        (
            'base = "gpt-text"\n[loss_scaling]\nbackoff = 2.0\n',
            ["backoff of the loss scaling is 2.0", "between 0 and 1"],
        ),
        ('base = "gpt-text"\n[optimizer]\nlr = 1.0\n', ["'lr'; did you mean 'learning_rate'?"]),
        ('base = "gpt-text"\nweights = 3\n', ["weights is 3; it must be a table"]),
        ('base = "gpt-text"\n[optimizer]\nbetas = 1.0\n', ["betas is 1.0", "a valid list"]),
        (OWN.replace(":batches", ":torch"), ["it is no function but a module", "data(split, "]),
        (
            OWN.replace(":batches", ":doubled"),
            ["takes (batch)", "data(split, seed, start_step"],
        ),
        (OWN.replace("nn.functional:cross_entropy", "nn:CrossEntropyLoss"), ["loss", "a class"]),
        (OWN.replace(":build", ":batches"), ["called as model(): missing a required argument"]),
        (OWN + 'callbacks = ["job_under_test:one"]\n', ["called as callbacks(pipe, event)"]),
        (OWN + '[metrics]\nm = "job_under_test:one"\n', ["metrics.m", "metrics(output, target)"]),
        (
            'base = "gpt-text"\nmicro_batch_sizes = [5]\n',
            ["micro-batch size 5", "batch size 32", "[1, 2, 4, 8, 16, 32]"],
        ),
        ('model = "job_under_test:build"\n', ["key 'data' is missing", "module:function"]),
        (OWN.replace(":build", ""), ["model is 'job_under_test'", "module:function"]),
        (OWN.replace("job_under_test:b", ".job_under_test:b"), ["whole name"]),
        (OWN.replace("job_under_test:b", "job_that_exits:b"), ["SystemExit: 3", "runs nothing"]),
        (OWN.replace("job_under_test:b", "job_that_fails:b"), ["ZeroDivisionError", "nothing"]),
        (
            'base = "gpt-text"\nname = "../away"\n',
            ["name is '../away'; it cannot name a directory"],
        ),
        ('base = "gpt-text"\nname = ".."\n', ["name is '..'; it cannot name a directory"]),
        (
            'base = "gpt-text"\nname = "a\\u0000b"\n',
            ["name is 'a\\x00b'; it cannot name a directory"],
        ),
        (
            'base = "gpt-text"\n[optimizer]\nbetas = [0.9, 1.0]\n',
            ["optimizer.betas[1] is 1.0; it must be < 1"],
        ),
        (OWN.replace(":build", ":buil"), ["has no function 'buil'", "did you mean 'build'?"]),
        (OWN.replace("job_under_test:b", "no_such_module:b"), ["no_such_module", "beside"]),
    ],
)
def test_a_mistake_is_answered_with_its_place_and_the_remedy(
    folder: Path, text: str, parts: list[str]
) -> None:
    path = written(folder, text)
    with pytest.raises(BadInput) as found:
        find_job(path)
    message = str(found.value)
    assert "\n" not in message
    assert str(path) in message
    for part in parts:
        assert part in message


def test_an_unknown_job_lists_those_there_are() -> None:
    with pytest.raises(BadInput, match=r"'gpt-txt' .*gpt-text, digits.*did you mean 'gpt-text'"):
        find_job("gpt-txt")


def test_a_file_that_is_not_toml_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(BadInput, match=r"does not end in \.toml"):
        find_job(tmp_path / "job.json")


def test_data_without_batches_are_refused(folder: Path) -> None:
    job = find_job(written(folder, OWN.replace(":batches", ":nothing")))
    with pytest.raises(BadInput, match="yields no batch"):
        job.example_batch()


def test_data_in_float64_are_refused_when_the_model_fails_on_them(folder: Path) -> None:
    job = find_job(written(folder, OWN.replace(":batches", ":doubles")))
    with pytest.raises(BadInput, match=r"float64 tensors, while .* torch.float32; .* yield tensor"):
        measure_job(job, "cpu")


def test_metrics_and_callbacks_are_named_like_the_other_functions(folder: Path) -> None:
    text = (
        OWN + 'callbacks = ["job_under_test:note"]\n[metrics]\naccuracy = "job_under_test:hits"\n'
    )
    module = folder / "job_under_test.py"
    module.write_text(MODULE + "def note(pipe, event): ...\ndef hits(output, target): ...\n")
    sys.modules.pop("job_under_test", None)
    job = find_job(written(folder, text))
    assert [callback.__name__ for callback in job.callbacks] == ["note"]
    assert {name: metric.__name__ for name, metric in job.metrics.items()} == {"accuracy": "hits"}
    part = find_job(written(folder, text.replace("job_under_test:hits", "losses.words")))
    assert part.metrics == {"accuracy": "losses.words"}
    for wrong, message in (
        (text.replace(":hits", ":hit"), "metrics.accuracy is 'job_under_test:hit'"),
        (text.replace(":note", ":nose"), r"callbacks\[0\] is 'job_under_test:nose'"),
        (text.replace("accuracy =", "loss ="), "a metric is called 'loss'"),
    ):
        with pytest.raises(BadInput, match=message):
            find_job(written(folder, wrong))


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("leave", r"ended the program \(SystemExit: 0\)"),
        ("one", "returned int, not a torch.nn.Module"),
    ],
)
def test_a_function_that_makes_no_model_is_refused(
    folder: Path, function: str, problem: str
) -> None:
    job = find_job(written(folder, OWN.replace(":build", f":{function}")))
    with pytest.raises(BadInput, match=problem):
        built_model(job)


@pytest.mark.parametrize(
    ("key", "written_as", "value", "words"),
    [
        ("steps", "0", 0, "steps is 0; it must be >= 1"),
        ("steps", '"7"', "7", "steps is '7'; input should be a valid integer"),
        ("clip_norm", "-0.5", -0.5, "clip_norm is -0.5; it must be >= 0"),
        ("batch_limit_s", "inf", float("inf"), "batch_limit_s is inf; input should be a finite"),
        ("micro_batch_sizes", "[0]", (0,), "micro_batch_sizes[0] is 0; it must be >= 1"),
        ("verify", '"all"', "all", "verify is 'all'; input should be 'first-step' or 'off'"),
        ("model", "3", 3, 'model is 3; write it as "module:function"'),
        ("optimizer", "{ momentum = true }", {"momentum": True}, "optimizer.momentum is True"),
    ],
)
def test_a_key_has_one_limit_in_a_file_and_in_python(
    folder: Path, key: str, written_as: str, value: object, words: str
) -> None:
    with pytest.raises(BadInput) as in_python, in_one_line():
        replace(find_job("gpt-text"), **{key: value})
    assert words in str(in_python.value)
    path = written(folder, f'base = "gpt-text"\n{key} = {written_as}\n')
    with pytest.raises(BadInput) as in_file:
        find_job(path)
    assert str(in_file.value) == f"{path}: {in_python.value}"
