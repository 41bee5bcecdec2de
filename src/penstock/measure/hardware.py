"""Devices that a profile can be estimated for: peak rates, and the shares of these in practice.

    large matrix product    sustained_share * product_share   * peak rate
    fused attention         sustained_share * attention_share * peak rate
    its backward            sustained_share * attention_backward_share * peak rate
    everything else         sustained_share * memory_share    * memory rate

Peaks are from data sheets. The shares are from these sources:

- Products: the best bfloat16 product of 100 repeats, found by a search over shapes ("maximum
  achievable matmul FLOPS", Bekman, Machine Learning Engineering, compute/accelerator, read in
  November 2026): A100 SXM 271.2 of 312 TFLOP/s, H100 SXM and H200 794.5 of 989. V100: 83 of 125
  TFLOP/s (Markidis et al., NVIDIA tensor core programmability, performance and precision, 2018).
- Fused attention, heads of 128, 4,096 words: A100 at most 73 % of the peak forward and 63 %
  backward (Dao, FlashAttention-2, 2023, section 4.1); the same kernel on the H100 368 and 310
  TFLOP/s (Shah et al., FlashAttention-3, NeurIPS 2024, figures 5 and 6). Newer kernels reach more
  there; PyTorch's own is the older one. V100: assumed equal to the product's share.
- Memory: 90 % for transfers of 100 MB and more (Isaev et al., Calculon, SC 2023, system A100-80GB).
- Sustained: a training run is slower than the best kernels, because shapes are not the best, clocks
  fall under load and not every message is hidden. One published run for each kind of device sets
  this share: MPT-1b with 2,048 words of ``benchmarks/hardware.py`` gives 0.75 on the A100 and 0.66
  on the H100. The other runs of that benchmark check it. H200 is as H100, V100 as A100.

If all shares are 1, a device is estimated at its roofline.
"""

from dataclasses import dataclass

from penstock.errors import BadInput

__all__ = ["HARDWARE", "Hardware", "hardware_named"]

MEMORY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peak rates of one device, and the shares of them that its kernels reach.

    ``half_flops_per_s`` is for bfloat16 (float16 on V100), ``flops_per_s`` for float32.
    ``launch_s`` is the least time of a kernel. ``fused_attention``: attention runs as one kernel,
    which never writes its scores.
    """

    flops_per_s: float
    half_flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    launch_s: float
    source: str
    product_share: float = 1.0
    attention_share: float = 1.0
    attention_backward_share: float = 1.0
    memory_share: float = 1.0
    sustained_share: float = 1.0
    fused_attention: bool = False


def gpu(
    rates: tuple[float, float, float],
    memory_bytes: float,
    shares: tuple[float, float, float, float],
    source: str,
) -> Hardware:
    """A GPU from its rates (float32, half, memory) and shares (product, attention and its backward,
    sustained).
    """
    flops_per_s, half_flops_per_s, bytes_per_s = rates
    product, attention, backward, sustained = shares
    return Hardware(
        flops_per_s,
        half_flops_per_s,
        bytes_per_s,
        memory_bytes,
        5e-6,
        source,
        product,
        attention,
        backward,
        MEMORY_SHARE,
        sustained,
        True,
    )


HARDWARE: dict[str, Hardware] = {
    "V100-16GB": gpu(
        (15.7e12, 125e12, 0.9e12), 16e9, (0.66, 0.66, 0.66, 0.75), "NVIDIA V100 data sheet, SXM2"
    ),
    "A100-80GB": gpu(
        (19.5e12, 312e12, 2.039e12), 80e9, (0.87, 0.73, 0.63, 0.75), "NVIDIA A100 data sheet, SXM"
    ),
    "H100-80GB": gpu(
        (67e12, 989e12, 3.35e12), 80e9, (0.80, 0.37, 0.31, 0.66), "NVIDIA H100 data sheet, SXM"
    ),
    "H200-141GB": gpu(
        (67e12, 989e12, 4.8e12), 141e9, (0.80, 0.37, 0.31, 0.66), "NVIDIA H200 data sheet, SXM"
    ),
    "cpu": Hardware(
        83e9, 83e9, 12e9, 8e9, 2e-6, "one 2.6 GHz core with two 256-bit multiply-add units"
    ),
}


def hardware_named(name: str) -> Hardware:
    """The device of that name in `HARDWARE`.

    Raises:
        BadInput: there is none; the message says which was probably meant.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    meant = [known for known in HARDWARE if name and known.lower().startswith(name.lower())]
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"use one of {', '.join(HARDWARE)}"
    raise BadInput(f"hardware '{name}' is not in the table; {hint}")
