"""Models that cannot be captured: the message names the line and the way out."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import BadInput, CaptureFailed

BATCH = (torch.randn(3, 4), torch.tensor([0, 1, 2]))
LOSS = functional.cross_entropy


class _Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values):
        return self.linear(values)


class Branches(_Linear):
    def forward(self, values):
        hidden = self.linear(values)
        if hidden.sum() > 0:  # the line to be named
            print("positive")
        return hidden


class Raises(_Linear):
    def forward(self, values):
        raise ValueError("no such thing\nand more")


class FixedRows(_Linear):
    def forward(self, values):
        return self.linear(values.view(3, 2, 2).flatten(1))


class ReadsItsMemory(_Linear):
    def forward(self, values):
        hidden = self.linear(values)
        return hidden + 0 * hidden.grad_fn.next_functions.index((None, 0))


class ReplacesItsHead(_Linear):
    def forward(self, values):
        self.linear = nn.Linear(4, 4)
        return self.linear(values)


def _on_meta():
    with torch.device("meta"):
        return Branches()


UNCAPTURED = {
    "asks for values that meta has not": (_on_meta, "build it on the CPU.*torch.where", 2),
    "raises": (Raises, "does not run on the example batch: ValueError.*no such thing; ", 1),
    "fixes the number of samples": (FixedRows, r"does not run on 2 samples.*x\.shape\[0\]", 1),
    "takes no tensors of other stages": (ReadsItsMemory, "move the line into a module", 2),
    "replaces modules": (ReplacesItsHead, r"replaces its modules \(linear\).*__init__", None),
    "is scripted": (
        lambda: torch.jit.script(_Linear()),
        "is a torch.jit.ScriptModule, .*pass the module that it was made of",
        None,
    ),
    "has scripted blocks": (
        lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(_Linear())),
        "'1' of Sequential is a torch.jit.ScriptModule",
        None,
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", UNCAPTURED)
def test_a_model_is_refused_in_a_line_that_names_the_line_and_the_way_out(name, capfd):
    make, words, offset = UNCAPTURED[name]
    model = make()
    with pytest.raises(CaptureFailed, match=words) as caught:
        capture_model(model, BATCH, loss=functional.cross_entropy)
    message = str(caught.value)
    assert "\n" not in message
    if offset is not None:
        line = type(model).forward.__code__.co_firstlineno + offset
        assert f"{__file__}:{line} `" in message
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err == ""


def test_a_second_thread_is_refused_while_the_first_captures():
    started, done = threading.Event(), threading.Event()

    class Waits(_Linear):
        def forward(self, values):
            started.set()
            done.wait(10)
            return super().forward(values)

    first = threading.Thread(target=capture_model, args=(Waits(), BATCH), kwargs={"loss": LOSS})
    first.start()
    started.wait(10)
    try:
        with pytest.raises(CaptureFailed, match=r"another thread captures.*one after the other"):
            capture_model(_Linear(), BATCH, loss=functional.cross_entropy)
    finally:
        done.set()
        first.join()
    capture_model(_Linear(), BATCH, loss=functional.cross_entropy)


@pytest.mark.parametrize(
    ("batch", "options", "words"),
    [
        (BATCH, {}, r"pass loss=\.\.\. if its last entry is the target"),
        (BATCH[0], {}, "gave a loss of shape"),
        (BATCH[0], {"loss": functional.mse_loss}, "no target"),
        (BATCH, {"loss": lambda output, target: output}, r"shape \(3, 4\)"),
        (BATCH, {"granularity": "line"}, "block, module, operator"),
        ({"z": BATCH[0]}, {"loss": functional.mse_loss}, "accepts none of the batch's keys"),
        (BATCH, {"loss": nn.CrossEntropyLoss}, r"Loss; give an object of it: .*Loss\(\)$"),
        (
            (BATCH[0].to_sparse(), BATCH[1]),
            {"loss": LOSS},
            r"^batch\[0\] has the layout torch.sparse_coo, .*to_dense",
        ),
    ],
)
def test_a_batch_or_loss_that_does_not_fit_is_refused(batch, options, words):
    with pytest.raises(BadInput, match=words):
        capture_model(_Linear(), batch, **options)


def test_a_wrapper_that_does_a_pipelines_work_is_refused_for_the_bare_module(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(_Linear())
        with pytest.raises(BadInput, match=r"pass the bare module \(its \.module\)"):
            capture_model(wrapped, BATCH, loss=functional.cross_entropy)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(BadInput, match=r"'0' is a DataParallel, .* pass the bare module"):
        capture_model(nn.Sequential(nn.DataParallel(_Linear())), BATCH, loss=LOSS)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    with pytest.raises(BadInput, match="'1' is a SyncBatchNorm, which is not needed here"):
        capture_model(net, BATCH, loss=functional.cross_entropy)


def test_edges_of_a_graph_that_were_taken_for_samples_are_told():
    class Sums(_Linear):
        def forward(self, values, edges):
            found = torch.zeros_like(values).index_add(0, edges[0], values[edges[1]])
            return self.linear(found.view(6, 4))

    batch = (torch.randn(6, 4), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), torch.arange(6) % 3)
    with pytest.raises(CaptureFailed, match=r"batch\[1\] has 2 rows, so 2 samples were assumed"):
        capture_model(Sums(), batch, loss=functional.cross_entropy)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("how", ["function", "method"])
def test_a_compiled_module_is_refused_for_the_bare_one(how, whole):
    part = _Linear()
    if how == "function":
        part = torch.compile(part, backend="eager")
    else:
        part.compile(backend="eager")
    model, named = (part, "the model") if whole else (nn.Sequential(part, nn.Tanh()), "'0'")
    with pytest.raises(
        BadInput, match=f"^{named} is compiled, .*pass the bare module, and capture"
    ):
        capture_model(model, BATCH, loss=LOSS)
