"""Chains: modules one after another, each a layer, with any code inside."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.errors import BadInput


class Gate(nn.Module):
    """Control flow on values; two tensors out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, values):
        hidden = self.linear(values)
        if hidden.sum() > 0:
            hidden = hidden * 2
        return hidden, values


class Join(nn.Module):
    def forward(self, hidden, values):
        return hidden + values


def _chain():
    modules = [nn.Linear(4, 8), nn.BatchNorm1d(8), Gate(), Join(), nn.Linear(8, 3)]
    return Chain(modules, nn.CrossEntropyLoss(ignore_index=2))


BATCH = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2]))


def test_stages_together_equal_the_chain(pipeline):
    chain, batch = _chain().double(), (BATCH[0].double(), BATCH[1])
    graph = capture_model(chain, batch)
    assert graph.layer_names == ("0", "1", "2", "3", "4", "loss")
    for cuts, rows in (([], 3), ([3], 5), ([1, 2, 3, 4], 2)):
        pipeline.assert_composition_equals_model(
            graph, chain, batch, cuts, loss=chain.loss, rows=rows
        )


def test_a_chain_weighs_slices_by_valid_targets(pipeline):
    graph = capture_model(_chain(), BATCH)
    run = pipeline.run_programs(graph, pipeline.split(graph, [2]), BATCH)
    assert run.weight.item() == 2


def test_a_loss_in_the_last_module_needs_no_loss_function(pipeline):
    class Head(nn.Module):
        def forward(self, values):
            return values.square().mean()

    chain = Chain([nn.Linear(4, 4), nn.Linear(4, 4), Head()])
    graph = capture_model(chain, BATCH[0])
    assert graph.layer_names == ("0", "1", "loss")
    run = pipeline.run_programs(graph, pipeline.split(graph, [1]), BATCH[0])
    torch.testing.assert_close(run.loss, chain(BATCH[0]))
    assert run.weight.item() == 3


def test_a_module_used_twice_is_one_parameter_with_two_layers():
    shared = nn.Linear(4, 4)
    graph = capture_model(Chain([shared, nn.Tanh(), shared], functional.mse_loss), (BATCH[0],) * 2)
    uses = {use.name: use.layers for use in graph.parameter_uses}
    assert uses == {"0.weight": (0, 2), "0.bias": (0, 2)}
    assert graph.tied_names == {"2.weight": "0.weight", "2.bias": "0.bias"}


def test_a_batch_norm_used_twice_cannot_be_cut_apart():
    norm = nn.BatchNorm1d(4)
    graph = capture_model(Chain([norm, norm], functional.mse_loss), (BATCH[0],) * 2)
    assert graph.layer_names == ("0", "loss")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Chain([]), "no modules"),
        (lambda: Chain([nn.Linear(2, 2), torch.relu]), "must be an nn.Module"),  # type: ignore
        (lambda: Chain({"loss": nn.Linear(2, 2)}), "rename"),
        (
            lambda: capture_model(Chain([nn.Linear(4, 4), nn.LSTM(4, 4), Join()]), BATCH[0]),
            "does not run on the example batch: TypeError at .*return hidden",
        ),
        (lambda: capture_model(_chain(), BATCH, loss=functional.mse_loss), "pass only one"),
        (lambda: capture_model(_chain(), BATCH).stage(range(2, 9)), r"range\(0, 6\); change"),
    ],
)
def test_what_a_chain_cannot_be_is_said(make, words):
    with pytest.raises(BadInput, match=words):
        make()


def test_code_that_leaves_torch_and_needs_no_parameters_is_a_layer(pipeline):
    class Rounds(nn.Module):
        def forward(self, values):
            return values * torch.from_numpy(values.detach().numpy().round())

    chain = Chain([nn.Linear(4, 4), Rounds(), nn.Linear(4, 3)], functional.cross_entropy).double()
    batch = BATCH[0].double(), BATCH[1]
    graph = capture_model(chain, batch)
    assert graph.layer_names == ("0", "1", "2", "loss")
    pipeline.assert_composition_equals_model(graph, chain, batch, [1, 2], loss=chain.loss)


def test_a_chain_takes_a_list_of_weighted_losses():
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    terms = [(1.0, nn.functional.mse_loss), (0.5, nn.functional.l1_loss)]
    model = nn.Linear(3, 2)
    loss, weight = capture_model(Chain([model]), (x, y), loss=terms).stage(range(2)).module(x, y)
    expected = nn.functional.mse_loss(model(x), y) + 0.5 * nn.functional.l1_loss(model(x), y)
    torch.testing.assert_close(loss, expected)
    assert weight == 4


@pytest.mark.parametrize(("blocks", "lines"), [(1, 3), (3, 5), (8, 10), (12, 10)])
def test_a_graph_prints_its_layers_in_ten_lines(blocks: int, lines: int) -> None:
    chain = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(blocks)])
    batch = torch.randn(8, 4), torch.randn(8, 4)
    graph = capture_model(chain, batch, loss=nn.functional.mse_loss)
    found = repr(graph).splitlines()
    assert len(found) == lines
    assert found[0] == f"LayerGraph of Sequential: {blocks + 1} layers, for 8 samples"
    assert found[1] == "    0  0.0 -> (8, 4) float32"
    assert found[-1].split() == [str(blocks), "loss"]
    assert lines < 10 or blocks == 8 or found[5].split() == ["...", "5", "more"]
    assert "<td>0.0</td><td>(8, 4) float32</td>" in graph._repr_html_()
