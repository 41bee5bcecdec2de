"""Blocks that do the same are traced twice, and the graph is the one of a trace of all."""

from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import fx, nn

from penstock.capture.block_structure import identity
from penstock.capture.trace import capture_model
from penstock.capture.traced_graph import TracedGraph
from penstock.errors import CaptureFailed

LAYERS = 6

NUMBERS: dict[int, int] = {}
"""The numbers of blocks, for those who must not ask the block."""


class Sign(torch.autograd.Function):
    """Has a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0]


class Block(nn.Module):
    """A residual block; ``traced`` has the number of each one that ran while it was traced."""

    traced: ClassVar[list[int]] = []

    def __init__(self, number: int, **attributes: Any) -> None:
        super().__init__()
        self.number = NUMBERS[identity(self)] = number
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        if torch.compiler.is_exporting():
            Block.traced.append(NUMBERS[identity(self)])
        return x + self.middle(self.inner(self.norm(x)))

    def middle(self, x):
        return x


class Net(nn.Module):
    """Blocks between two linear layers."""

    def __init__(self, blocks: list[Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.through(self.first(x)))

    def through(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def _none_traced():
    Block.traced.clear()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 4), torch.tensor([0, 1, 2, 0])


def captured(model: nn.Module, given: Any, **settings: Any) -> TracedGraph:
    loss = nn.functional.cross_entropy if isinstance(given, tuple) else None
    graph = capture_model(model, given, loss=loss, **settings)
    assert isinstance(graph, TracedGraph)
    return graph


def in_full(model: nn.Module, given: Any) -> TracedGraph:
    """The graph of a trace of every block, which is not counted."""
    before = list(Block.traced)
    graph = captured(model, given, reuse_blocks=False)
    Block.traced[:] = before
    return graph


def operations(graph: fx.Graph) -> list[Any]:
    """The operators of a region, with their arguments by position."""
    positions = {node: k for k, node in enumerate(graph.nodes)}
    found: list[Any] = []
    for node in graph.nodes:
        arguments = fx.map_arg((node.args, dict(node.kwargs)), positions.__getitem__)  # pyright: ignore
        target = node.target if node.op == "call_function" else ""
        found.append((node.op, str(target), repr(arguments)))
    return found


def lines(graph: fx.Graph, owner: TracedGraph | None = None) -> list[Any]:
    """Everything about the nodes of a graph but the numbers that torch gives to its constants."""
    constants = owner.flow.clean.constants if owner else {}
    bodies = owner.flow.clean.bodies if owner else {}

    def word(node: fx.Node) -> Any:
        target = str(node.target)
        if node.op == "get_attr" and target in constants:
            return ("constant", constants[target].tolist())
        if node.op == "get_attr" and isinstance(bodies.get(target), fx.GraphModule):
            return ("body", str(operations(bodies[target].graph)))  # pyright: ignore
        if node.op == "get_attr" and target in bodies:
            return ("call", type(bodies[target]), bodies[target].description)  # pyright: ignore
        return node.name

    found: list[Any] = []
    for node in graph.nodes:
        if node.op == "get_attr" and (str(node.target) in constants or str(node.target) in bodies):
            continue
        value = node.meta.get("val")
        shapes = [
            (tuple(str(size) for size in v.shape), v.dtype, v.requires_grad)
            for v in (value if isinstance(value, list | tuple) else [value])
            if isinstance(v, torch.Tensor)
        ]
        stack = [(k, v[0], str(v[1])) for k, v in (node.meta.get("nn_module_stack") or {}).items()]
        arguments = fx.map_arg((node.args, dict(node.kwargs)), word)  # pyright: ignore
        entry = (node.op, node.name, node.target, repr(arguments), shapes)
        found.append((*entry, stack, node.meta.get("stack_trace")))
    return found


def assert_same(one: TracedGraph, other: TracedGraph) -> None:
    for mine, full in zip(
        lines(one.flow.clean.graph, one), lines(other.flow.clean.graph, other), strict=True
    ):
        assert mine == full
    assert one.layer_names == other.layer_names
    assert one.crossings == other.crossings
    assert one.parameter_uses == other.parameter_uses


def assert_traced(model: nn.Module, wanted: list[int]) -> None:
    """Capture gives the graph of a full trace, and of the blocks ``wanted`` are run for it."""
    given = batch()
    graph = captured(model, given)
    assert Block.traced == wanted
    assert_same(graph, in_full(model, given))


def decoder(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 40, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return {**sizes, **heads, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 1, **changes}


def text_model(name: str, **config: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    class_ = getattr(transformers, name)
    tokens = torch.randint(2, 40, (3, 6))
    mask = torch.tensor([[1] * 6, [1] * 5 + [0], [1] * 4 + [0] * 2])
    return class_(class_.config_class(**config)), {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.clone(),
    }


def gpt2():
    return text_model(
        "GPT2LMHeadModel", n_layer=3, n_embd=16, n_head=2, vocab_size=40, n_positions=16
    )


def t5():
    sizes = {"num_layers": 4, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    return text_model(
        "T5ForConditionalGeneration", **sizes, vocab_size=40, decoder_start_token_id=0
    )


def gemma2():
    return text_model("Gemma2ForCausalLM", **decoder(num_hidden_layers=6, sliding_window=4))


def mixtral():
    return text_model("MixtralForCausalLM", **decoder(num_local_experts=4))


def vit():
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
    )
    pictures = {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.tensor([0, 1, 1])}
    return transformers.ViTForImageClassification(config), pictures


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[5, 1], num_labels=5, layer_type="basic"
    )
    pictures = {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.tensor([0, 3, 4])}
    return transformers.ResNetForImageClassification(config), pictures


@pytest.mark.parametrize(
    ("make", "part", "run"),
    [
        (gpt2, "GPT2Block", 2),
        pytest.param(
            lambda: text_model("LlamaForCausalLM", **decoder()),
            *("LlamaDecoderLayer", 2),
            marks=pytest.mark.slow,
        ),
        (t5, "T5Block", 6),
        pytest.param(gemma2, "Gemma2DecoderLayer", 4, marks=pytest.mark.slow),
        (mixtral, "MixtralDecoderLayer", 2),
        (vit, "ViTLayer", 2),
        (resnet, "ResNetBasicLayer", 3),
    ],
    ids=["gpt2", "llama", "t5", "gemma2", "mixtral", "vit", "resnet"],
)
def test_a_model_is_captured_as_if_every_block_had_been_traced(make, part, run, monkeypatch):
    model, given = make()
    kind = next(type(module) for module in model.modules() if type(module).__name__ == part)
    forward, calls = kind.forward, []

    def counted(*arguments, **options):
        # Image models note the kind of problem in their configuration, so that capture runs them
        # plainly, too, to see whether that matters.
        if torch.compiler.is_exporting():
            calls.append(1)
        return forward(*arguments, **options)

    monkeypatch.setattr(kind, "forward", counted)
    graph = captured(model, given)
    assert len(calls) == run
    assert_same(graph, captured(model, given, reuse_blocks=False))


def test_two_of_many_blocks_are_traced():
    assert_traced(Net([Block(k) for k in range(LAYERS)]), [0, 1])


def test_a_block_with_another_attribute_that_is_read_is_traced():
    class Scaled(Block):
        def middle(self, x):
            return x * self.scale

    blocks = [Scaled(k, scale=2.0 if k == 4 else 1.0) for k in range(LAYERS)]
    assert_traced(Net(blocks), [0, 1, 4])


def test_blocks_that_ask_for_their_number_are_all_traced():
    class Late(Block):
        def middle(self, x):
            return x * 2 if self.number >= 4 else x

    assert_traced(Net([Late(k) for k in range(LAYERS)]), list(range(LAYERS)))


def test_an_attribute_of_an_object_counts_as_one_of_the_block():
    class Settings:
        def __init__(self, scale):
            self.scale = scale

    class Scaled(Block):
        def middle(self, x):
            return x * self.settings.scale

    blocks = [Scaled(k, settings=Settings(1 + k % 2)) for k in range(LAYERS)]
    assert_traced(Net(blocks), [0, 1, 2, 3])


def test_code_that_reads_all_attributes_reads_each():
    class Scaled(Block):
        def middle(self, x):
            return x * vars(self).get("scale", 1.0)

    blocks = [Scaled(k, scale=2.0 if k == 4 else 1.0) for k in range(LAYERS)]
    assert_traced(Net(blocks), list(range(LAYERS)))


def test_blocks_in_another_mode_are_traced():
    model = Net([Block(k) for k in range(LAYERS)])
    for k in (3, 4, 5):
        model.blocks[k].eval()
    assert_traced(model, [0, 1, 3, 4])


def test_blocks_that_are_frozen_are_traced_apart():
    model = Net([Block(k) for k in range(LAYERS)])
    for k in (0, 1, 2):
        model.blocks[k].requires_grad_(False)
    assert_traced(model, [0, 1, 3, 4])


def test_batch_norms_of_copied_blocks_keep_statistics_of_their_own(pipeline):
    class Normed(Block):
        def __init__(self, number):
            super().__init__(number)
            self.norm = nn.BatchNorm1d(8)
            self.inner[2] = nn.Identity()

    model = Net([Normed(k) for k in range(LAYERS)])
    assert_traced(model, [0, 1])
    model, given = model.double(), (batch()[0].double(), batch()[1])
    graph = captured(model, given)
    cuts = list(range(1, len(graph.layer_names)))
    pipeline.assert_composition_equals_model(
        graph, model, given, cuts, loss=nn.functional.cross_entropy, rows=5
    )


def test_one_block_that_is_called_again_and_again_is_copied():
    class Repeated(Net):
        def through(self, x):
            for _ in range(LAYERS):
                x = self.blocks[0](x)
            return x

    assert_traced(Repeated([Block(0)]), [0, 0])


def test_a_batch_norm_that_is_called_again_is_traced_again():
    class Normed(Block):
        def __init__(self, number):
            super().__init__(number)
            self.norm = nn.BatchNorm1d(8)

    class Repeated(Net):
        def through(self, x):
            for _ in range(4):
                x = self.blocks[0](x)
            return x

    model, given = Repeated([Normed(0)]), batch()
    assert_same(captured(model, given), in_full(model, given))


def test_blocks_with_tensors_in_common_are_copied():
    shared = nn.Linear(8, 8)

    class Sharing(Block):
        def __init__(self, number):
            super().__init__(number)
            self.shared = shared

        def middle(self, x):
            return self.shared(x)

    assert_traced(Net([Sharing(k) for k in range(LAYERS)]), [0, 1])


def test_blocks_that_tie_other_tensors_are_traced():
    class Tied(Block):
        def __init__(self, number):
            super().__init__(number)
            self.second = nn.Linear(8, 8)
            if number == 4:
                self.second.weight = self.inner[0].weight

        def middle(self, x):
            return self.second(x)

    assert_traced(Net([Tied(k) for k in range(LAYERS)]), [0, 1, 4])


def test_what_a_block_hands_to_an_object_of_others_is_not_lost():
    kept: list[torch.Tensor] = []

    class Keeping(Block):
        def middle(self, x):
            kept.append(x)
            return x

    class Reading(Net):
        def through(self, x):
            kept.clear()
            return super().through(x) + sum(kept)

    model, given = Reading([Keeping(k) for k in range(LAYERS)]), batch()
    assert_same(captured(model, given), in_full(model, given))


def test_what_a_block_takes_from_outside_is_not_mistaken():
    given_before: list[torch.Tensor] = []

    class Taking(Block):
        def middle(self, x):
            return x * given_before[-1]

    class Giving(Net):
        def through(self, x):
            for block in self.blocks:
                given_before.append(x.sigmoid())
                x = block(x)
            return x

    model, given = Giving([Taking(k) for k in range(LAYERS)]), batch()
    assert_same(captured(model, given), in_full(model, given))


def test_results_besides_tensors_and_arguments_handed_through_come_back():
    class Several(Block):
        def forward(self, x, bias=None, words=1):
            y = super().forward(x)
            bias = y.mean(0, keepdim=True) if bias is None else bias
            return {"x": y + bias * words, "bias": bias, "rows": x.shape[0], "none": None}

    class Unpacking(Net):
        def through(self, x):
            bias = None
            for block in self.blocks:
                found = block(x, bias=bias, words=2)
                assert found["none"] is None
                x, bias = found["x"], found["bias"]
                x = x.reshape(found["rows"], 2, 4).flatten(1)
            return x

    assert_traced(Unpacking([Several(k) for k in range(LAYERS)]), [0, 1, 2])


def test_blocks_within_blocks_are_copied():
    class Outer(Block):
        def __init__(self, number):
            super().__init__(number)
            self.experts = nn.ModuleList(Block(10 * (number + 1) + k) for k in range(4))

        def middle(self, x):
            return sum(expert(x) for expert in self.experts)

    model = Net([Outer(k) for k in range(LAYERS)])
    assert_traced(model, [0, 10, 11, 1])


def test_another_attribute_within_a_block_within_a_block_is_seen():
    class Expert(Block):
        def middle(self, x):
            return x * self.scale

    class Outer(Block):
        def __init__(self, number):
            super().__init__(number)
            scales = [1.0, 1.0, 1.0, 3.0 if number == 4 else 1.0]
            self.experts = nn.ModuleList(
                Expert(10 * (number + 1) + k, scale=scale) for k, scale in enumerate(scales)
            )

        def middle(self, x):
            return sum(expert(x) for expert in self.experts)

    assert_traced(Net([Outer(k) for k in range(LAYERS)]), [0, 10, 11, 1, 4, 53])


def test_regions_constants_and_custom_functions_inside_of_blocks_are_copied():
    class Odd(Block):
        def middle(self, x):
            with torch.no_grad():
                limit = x.abs().amax() * torch.tensor(2.0)
            with torch.autocast("cpu", torch.bfloat16):
                y = self.inner[0](x)
            return Sign.apply(x).clamp(-limit, limit) + y.to(x.dtype)

    assert_traced(Net([Odd(k) for k in range(LAYERS)]), [0, 1])


def test_constants_that_differ_are_seen():
    class Table(Block):
        def __init__(self, number):
            super().__init__(number)
            self.table = torch.full((8,), float(number))

        def middle(self, x):
            return x * self.table

    assert_traced(Net([Table(k) for k in range(LAYERS)]), list(range(LAYERS)))


def test_blocks_in_a_region_are_traced():
    class Half(Net):
        def through(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().through(x).float()

    assert_traced(Half([Block(k) for k in range(LAYERS)]), list(range(LAYERS)))


def test_blocks_with_hooks_are_traced():
    model = Net([Block(k) for k in range(LAYERS)])
    for block in model.blocks:
        block.inner[0].register_forward_hook(lambda module, args, result: result * 2)
    try:
        assert_traced(model, list(range(LAYERS)))
    except CaptureFailed:
        pytest.fail("hooks of modules are traced")


def test_a_block_with_a_forward_of_its_own_is_traced():
    model = Net([Block(k) for k in range(LAYERS)])
    plain = model.blocks[4].forward
    model.blocks[4].forward = lambda x: plain(x) * 2
    assert_traced(model, [0, 1, 4])


def test_arguments_of_other_values_or_shapes_are_traced():
    class Counting(Net):
        def through(self, x):
            for k, block in enumerate(self.blocks):
                x = block(x, k // 3)
            return x

    class Powered(Block):
        def forward(self, x, power):
            return super().forward(x) * 2**power

    assert_traced(Counting([Powered(k) for k in range(LAYERS)]), [0, 1, 3, 4])


def test_blocks_that_write_into_their_argument_are_right(pipeline):
    class Writing(Block):
        def forward(self, x):
            x = x.clone()
            x += super().forward(x)
            x[:, 0] = 0
            return x

    assert_traced(Net([Writing(k) for k in range(LAYERS)]), [0, 1])


def test_tracing_leaves_no_marks_on_modules():
    call, look = nn.Module._call_impl, nn.Module.__getattribute__
    capture_model(Net([Block(k) for k in range(LAYERS)]), batch(), loss=nn.functional.cross_entropy)
    assert nn.Module._call_impl is call
    assert nn.Module.__getattribute__ is look
    assert "__getattribute__" not in vars(nn.Module)
