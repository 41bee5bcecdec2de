"""Models that cannot be captured: the message names the line and the way out."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.trace import capture_model
from penstock.errors import BadInput, CaptureFailed

BATCH = (torch.randn(3, 4), torch.tensor([0, 1, 2]))


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
            hidden = hidden * 2
        return hidden


class CallsOut(_Linear):
    def forward(self, values):
        return self.linear(values) + torch.from_numpy(values.detach().numpy())


class FixedRows(_Linear):
    def forward(self, values):
        return self.linear(values.view(3, 2, 2).flatten(1))


class CastsItsWeights(_Linear):
    def forward(self, values):
        return self.linear.double()(values.double())


def _message(model, **options):
    with pytest.raises(CaptureFailed) as caught:
        capture_model(model, BATCH, loss=functional.cross_entropy, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_control_flow_on_values_that_meta_has_not_names_the_line_and_the_way_out():
    with torch.device("meta"):
        model = Branches()
    message = _message(model)
    line = Branches.forward.__code__.co_firstlineno + 2
    assert f"{__file__}:{line} `if hidden.sum() > 0:" in message
    assert "penstock.Chain([...])" in message
    assert "torch.where" in message


def test_code_that_leaves_torch_names_the_line():
    line = CallsOut.forward.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} `return self.linear(values) + torch.from_numpy" in _message(
        CallsOut()
    )


def test_a_fixed_number_of_samples_is_said():
    message = _message(FixedRows())
    assert "fixes the number of samples (3)" in message
    assert "x.shape[0]" in message


def test_nothing_is_printed_beside_the_exception(capfd):
    with torch.device("meta"):
        model = Branches()
    _message(model)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == ""


@pytest.mark.parametrize(
    ("batch", "options", "words"),
    [
        (BATCH, {}, r"pass loss=\.\.\. if its last entry is the target"),
        (BATCH[0], {}, "gave a loss of shape"),
        (BATCH[0], {"loss": functional.mse_loss}, "no target"),
        (BATCH, {"loss": lambda output, target: output}, r"shape \(samples, 4\)"),
        (BATCH, {"granularity": "line"}, "block, module, operator"),
        ({"z": BATCH[0]}, {"loss": functional.mse_loss}, "accepts none of the batch's keys"),
    ],
)
def test_a_batch_or_loss_that_does_not_fit_is_refused(batch, options, words):
    with pytest.raises(BadInput, match=words):
        capture_model(_Linear(), batch, **options)


def test_a_stage_outside_of_the_layers_is_refused():
    graph = capture_model(_Linear(), BATCH, loss=functional.cross_entropy)
    with pytest.raises(BadInput, match=r"range\(0, 2\)"):
        graph.stage(range(1, 3))


def test_a_module_that_is_cast_in_forward_names_the_line():
    message = _message(CastsItsWeights())
    assert "Linear.to at" in message and "self.linear.double()" in message
    assert "penstock.Chain" in message


def test_a_wrapper_that_does_a_pipelines_work_is_refused_for_the_bare_module(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(_Linear())
        with pytest.raises(BadInput, match=r"pass the bare module \(model\.module\)"):
            capture_model(wrapped, BATCH, loss=functional.cross_entropy)
    finally:
        torch.distributed.destroy_process_group()
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
