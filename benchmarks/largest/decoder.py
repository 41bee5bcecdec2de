"""The profile of a decoder from its shape alone, as one tensor group of GPUs runs it.

Seconds are those of `penstock.measure.hardware`: matrix products and fused attention at their
shares of the peak rate, everything else at the rate of the memory. Formulas count one sample:

    products of a block      2 s (2 h h + 2 h h k / a + m h f) operations
    attention                4 s s h operations; half of it where a fused kernel skips the future
    a backward               twice the operations of its forward; fused attention 2.5 times

with ``s`` words, ``h`` hidden sizes, ``a`` heads, ``k`` of them with keys of their own, an inner
size ``f`` and ``m`` matrices in the multilayer perceptron (Narayanan et al., SC 2021, appendix;
Korthikanti et al., MLSys 2023, section 4, for the bytes that a block saves).
"""

from dataclasses import dataclass

from penstock.measure.hardware import Hardware
from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    ModelProfile,
    SharedParameter,
    TensorParallelCosts,
)

HALF = 2
"""Bytes of a number in half precision."""

OUTER_PASSES = 11.0
"""Times that a block's forward moves its input: two norms, and two sums with bias and dropout."""

SCORE_PASSES = 4.5
"""Times that attention that is not fused moves its scores: a softmax, then dropout and its mask."""

BACKWARD_PASSES = 1.5
"""The bytes that the backward of such operators moves, over those of the forward."""

STEP_PASSES = 20.0
"""Bytes that Adam moves for each byte of the parameters: 40 bytes for a parameter of two. It makes
the gradient one of four bytes, sums its square, reads and writes a copy of the parameter and two
moments in four bytes, and writes the parameter."""


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder, and how it is trained.

    ``recompute`` is "none", "full" (each block's input is kept) or "selective" (all but what
    attention makes). With ``sequence_parallel`` the group also divides norms and dropout. With
    ``hides_sums`` the sums of the group pass behind products. Where a block is no plain one,
    ``used_weights`` multiply each word, ``held_weights`` lie on a device, and attention costs what
    plain heads of ``attention_size`` together do. ``product_speed`` is that of products relative to
    half precision.
    """

    layers: int
    hidden: int
    heads: int
    words: int
    vocabulary: int
    key_heads: int = 0
    inner: int = 0
    gated: bool = False
    tied: bool = True
    fused_attention: bool = False
    sequence_parallel: bool = False
    hides_sums: bool = False
    recompute: str = "none"
    used_weights: float = 0.0
    held_weights: float = 0.0
    attention_size: int = 0
    product_speed: float = 1.0

    @property
    def block_parameters(self) -> float:
        """Weights of the matrices of one block that each word meets."""
        if self.used_weights:
            return self.used_weights
        keys = 2 * (self.key_heads or self.heads) / self.heads
        inner = self.inner or 4 * self.hidden
        return self.hidden**2 * (2 + keys) + (3 if self.gated else 2) * self.hidden * inner

    @property
    def parameters(self) -> float:
        """Weights of all blocks, embedding and head."""
        tables = (1 if self.tied else 2) * self.hidden * self.vocabulary
        return self.layers * (self.held_weights or self.block_parameters) + tables

    @property
    def model_operations(self) -> float:
        """Operations of forward and backward of one sample, without recompute, scores in full."""
        head = self.hidden * self.vocabulary
        products = 6 * self.words * (self.layers * self.block_parameters + head)
        return products + 3 * self.layers * self.attention_operations

    @property
    def attention_operations(self) -> float:
        """Operations of attention in the forward of one block, scores in full."""
        return 4 * self.words**2 * (self.attention_size or self.hidden)


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of one block on one GPU, for a sample: forward, and the halves of the backward.

    ``whole_s`` of the forward are in operators that a tensor group does not divide.
    """

    forward_s: float
    input_s: float
    weight_s: float
    whole_s: float


def products_of(shape: Decoder, ranks: int) -> list[tuple[float, float]]:
    """Inputs of each matrix of a block on one of ``ranks`` GPUs, and its outputs."""
    if shape.used_weights:
        return [(shape.hidden, shape.used_weights / shape.hidden / ranks)]
    h, inner = shape.hidden, (shape.inner or 4 * shape.hidden) / ranks
    keys = 2 * h * (shape.key_heads or shape.heads) / shape.heads
    return [
        (h, (h + keys) / ranks),
        (h / ranks, h),
        (h, inner * (2 if shape.gated else 1)),
        (inner, h),
    ]


def product_s(hardware: Hardware, rows: int, columns: float, sums: float, count: int = 1) -> float:
    """Seconds of products with results of ``rows`` x ``columns``, for all ``count``."""
    rate = hardware.half_flops_per_s * hardware.sustained_share * hardware.product_share
    share = hardware.filled(rows, round(columns), count)
    moved = HALF * count * (rows * columns + rows * sums + sums * columns)
    memory = hardware.bytes_per_s * hardware.memory_share * hardware.sustained_share
    return max(2 * count * rows * columns * sums / (rate * share), moved / memory)


def block_seconds(shape: Decoder, hardware: Hardware, ranks: int, samples: int) -> BlockSeconds:
    """One block, before a group divides it, for each of ``samples``."""
    peak = hardware.half_flops_per_s * hardware.sustained_share
    memory = hardware.bytes_per_s * hardware.memory_share * hardware.sustained_share
    rows, scale = shape.words * samples, ranks / samples / shape.product_speed
    matrices = products_of(shape, ranks)
    forward_product_s = scale * sum(product_s(hardware, rows, out, into) for into, out in matrices)
    input_product_s = scale * sum(product_s(hardware, rows, into, out) for into, out in matrices)
    weight_s = scale * sum(product_s(hardware, round(into), out, rows) for into, out in matrices)
    attention = shape.attention_operations
    scores_s = SCORE_PASSES * HALF * shape.heads * shape.words**2 / memory
    attention_s = attention / (peak * hardware.product_share) + scores_s
    backward_s = 2 * (attention_s - scores_s) + BACKWARD_PASSES * scores_s
    if shape.fused_attention:
        attention_s = attention / 2 / (peak * hardware.attention_share)
        backward_s = 2.5 * attention / 2 / (peak * hardware.attention_backward_share)
    inner_passes = 3 if shape.gated else 2
    inner_s = inner_passes * HALF * shape.words * (shape.inner or 4 * shape.hidden) / memory
    outer_s = OUTER_PASSES * HALF * shape.words * shape.hidden / memory
    forward_s = forward_product_s + attention_s + inner_s + outer_s
    again_s = {"none": 0.0, "selective": attention_s, "full": forward_s}[shape.recompute]
    input_s = input_product_s + backward_s + BACKWARD_PASSES * (inner_s + outer_s) + again_s
    whole_s = 0.0 if shape.sequence_parallel else outer_s
    return BlockSeconds(forward_s, input_s, weight_s, whole_s)


def saved_bytes(shape: Decoder, ranks: int) -> tuple[float, float]:
    """Bytes that a rank keeps of a block for a sample: until the backward, and all within it."""
    sizes = shape.words * shape.hidden
    scores = 0 if shape.fused_attention else 5 * shape.heads * shape.words**2
    whole = sizes * (0 if shape.sequence_parallel else 10)
    all_of = whole + (34 * sizes - whole + scores) / ranks
    inputs = HALF * sizes / (ranks if shape.sequence_parallel else 1)
    kept = {"none": all_of, "selective": all_of - scores / ranks, "full": inputs}
    return kept[shape.recompute], all_of


def decoder_profile(
    shape: Decoder, ranks: int, device: str, hardware: Hardware, samples: int = 1
) -> ModelProfile:
    """Embedding, blocks and head, with what a group of ``ranks`` divides, at the speed that
    micro-batches of ``samples`` have.

    What the ranks of a group keep and send to the next stage, and tied parameters, are those of one
    rank: a group sends every value once, each rank its part (SC 2021, section 4.1).
    """
    block = block_seconds(shape, hardware, ranks, samples)
    kept, within = saved_bytes(shape, ranks)
    table = HALF * shape.hidden * shape.vocabulary
    size = HALF * shape.words * shape.hidden
    memory = hardware.bytes_per_s * hardware.memory_share * hardware.sustained_share
    peak = hardware.half_flops_per_s * hardware.sustained_share * hardware.product_share
    look_up_s = 3 * size / memory
    head_s = shape.words * shape.vocabulary * (2 * shape.hidden / peak + 16 / memory)
    own = 0 if shape.tied else table
    layers = [
        LayerCost("embedding", linear(look_up_s), linear(0), linear(look_up_s), own),
        *(
            LayerCost(
                f"block {index}",
                linear(block.forward_s),
                linear(block.input_s),
                linear(block.weight_s),
                round(HALF * (shape.held_weights or shape.block_parameters)),
                saved_bytes=linear(kept),
                workspace_bytes=linear(within - kept),
            )
            for index in range(shape.layers)
        ),
        LayerCost(
            "head",
            linear(head_s),
            linear(head_s),
            linear(head_s),
            own,
            saved_bytes=linear(4 * shape.words * (shape.vocabulary / ranks + shape.hidden)),
            workspace_bytes=linear(HALF * shape.words * shape.vocabulary / ranks),
        ),
    ]
    tensor = linear(size / ranks)
    edges = (Edge(i, i + 1, f"hidden {i}", tensor, tensor) for i in range(len(layers) - 1))
    tied = (SharedParameter("embedding", table // ranks, (0, len(layers) - 1)),)
    sums = 0 if shape.hides_sums else 6 if shape.recompute == "full" else 4
    divided = 1 - block.whole_s / block.forward_s
    return ModelProfile(
        f"decoder, {shape.layers} x {shape.hidden}",
        tuple(layers),
        tuple(edges),
        tied if shape.tied else (),
        step_s_per_byte=STEP_PASSES / memory,
        source=f"computed for {device} ({hardware.source})",
        tensor_parallel=TensorParallelCosts(
            (1.0, *(divided,) * shape.layers, 1.0),
            (2.0, *(float(sums),) * shape.layers, 2.0),
            (2.0 * size, *(float(sums * size),) * shape.layers, 2.0 * size),
        ),
    )


def linear(per_sample: float) -> Affine:
    """A cost in proportion to the samples."""
    return Affine(0.0, per_sample)
