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
  MI300X 668.4 of 1,307 TFLOP/s (Bekman's table again). Nobody's figures were found for the others:
  Ampere and Ada are assumed to be as the A100, Blackwell as the H100, Turing as the V100. The GB10
  of a DGX Spark runs kernels as Ada does, without those of the B200, and is assumed to be as that.
  Its peak in bfloat16 is not published: it is an eighth of the 1 PFLOP/s in FP4 with sparsity.
- Fused attention, heads of 128, 4,096 words: A100 at most 73 % of the peak forward and 63 %
  backward (Dao, FlashAttention-2, 2023, section 4.1); the same kernel on the H100 368 and 310
  TFLOP/s (Shah et al., FlashAttention-3, NeurIPS 2024, figures 5 and 6). Newer kernels reach more
  there; PyTorch's own is the older one. V100: assumed equal to the product's share.
- Memory: 90 % for transfers of 100 MB and more (Isaev et al., Calculon, SC 2023, system A100-80GB).
- Sustained: a training run is slower than the best kernels, because shapes are not the best, clocks
  fall under load and not every message is hidden. One published run for each kind of device sets
  this share: MPT-1b with 2,048 words of ``benchmarks/hardware.py`` gives 0.78 on the A100 and 0.67
  on the H100. The other runs of that benchmark check it. Of newer kinds than the A100 all others
  are as the H100, the rest as the A100.

A product is computed in tiles of its result, one on each processor of the device at a time. So a
last wave that is not full costs as much as a full one, and a tile at the edge as much as a whole
one (NVIDIA, Matrix multiplication background user's guide, 2023, sections 3.1 and 3.2, with its
tiles of 256 x 128). Numbers of processors are those of the data sheets.

If all shares are 1, a device is estimated at its roofline. A device that is not in the table has a
file of its own (`hardware_of`).
"""

from dataclasses import MISSING, dataclass, fields
from math import ceil
from typing import Annotated, Any

from pydantic import Field

from penstock.cluster.cluster import may_be
from penstock.errors import BadInput
from penstock.files import Entry, Table, check_document, parse_toml, read_text

MEMORY_SHARE = 0.9

LAUNCH_S = 5e-6

TILE = (256, 128)
"""Rows and columns, or columns and rows, of a result that one processor computes at a time."""

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class Hardware(Table):
    """Peak rates of one device, and the shares of them that its kernels reach.

    ``half_flops_per_s`` is for bfloat16 (float16 on V100 and T4) with sums in float32 and without
    sparsity, ``flops_per_s`` for float32 outside of tensor cores.
    ``processors`` are the multiprocessors, 0 if products are not to be rounded up to full waves.
    ``launch_s`` is the least time of a kernel. ``fused_attention``: attention runs as one kernel,
    which never writes its scores. A file may say which device it is ``like``.
    """

    name: str
    flops_per_s: Rate
    half_flops_per_s: Rate
    bytes_per_s: Rate
    memory_bytes: Rate
    source: str
    product_share: Share = 1.0
    attention_share: Share = 1.0
    attention_backward_share: Share = 1.0
    sustained_share: Share = 1.0
    memory_share: Share = 1.0
    fused_attention: bool = False
    processors: Annotated[int, Field(ge=0)] = 0
    launch_s: Rate = LAUNCH_S
    like: str = ""

    def filled(self, rows: int, columns: int, count: int = 1) -> float:
        """The share of the processors' time that ``count`` products with results of ``rows`` x
        ``columns`` use. Where tiles are fewer than processors, cuBLAS divides a product along its
        sum, so that only the edges of tiles are lost.
        """
        if not self.processors:
            return 1.0
        high, wide = TILE
        tiles = count * min(
            ceil(rows / high) * ceil(columns / wide), ceil(rows / wide) * ceil(columns / high)
        )
        waves = tiles / self.processors
        used = count * rows * columns / (high * wide * self.processors)
        return used / (ceil(waves) if waves > 1 else waves)


V100_SHARES = (0.66, 0.66, 0.66, 0.78)
A100_SHARES = (0.87, 0.73, 0.63, 0.78)
ADA_SHARES = (0.87, 0.73, 0.63, 0.67)
H100_SHARES = (0.80, 0.37, 0.31, 0.67)
MI300X_SHARES = (0.51, 0.37, 0.31, 0.67)

PROCESSORS = {
    **{"V100-16GB": 80, "A100-40GB": 108, "A100-80GB": 108, "H100-80GB": 132, "H200-141GB": 132},
    **{"H20-96GB": 78, "B200-180GB": 148, "T4-16GB": 40, "A10-24GB": 72, "L4-24GB": 58},
    **{"L40S-48GB": 142, "RTX3090-24GB": 82, "RTX4090-24GB": 128, "RTX4080-16GB": 76},
    **{"GB10-128GB": 48},
}
"""Multiprocessors of NVIDIA's devices."""


def gpu(
    name: str,
    rates: tuple[float, float, float],
    memory_bytes: float,
    shares: tuple[float, float, float, float],
    source: str,
) -> Hardware:
    """A GPU from its rates (float32, half, memory) and shares (product, attention and its backward,
    sustained).
    """
    processors = PROCESSORS.get(name, 0)
    return Hardware(name, *rates, memory_bytes, source, *shares, MEMORY_SHARE, True, processors)


CPU = "one 2.6 GHz core with two 256-bit multiply-add units"

KINDS = (
    gpu("V100-16GB", (15.7e12, 125e12, 0.9e12), 16e9, V100_SHARES, "NVIDIA V100 data sheet, SXM2"),
    gpu("A100-40GB", (19.5e12, 312e12, 1.555e12), 40e9, A100_SHARES, "NVIDIA A100 data sheet, SXM"),
    gpu("A100-80GB", (19.5e12, 312e12, 2.039e12), 80e9, A100_SHARES, "NVIDIA A100 data sheet, SXM"),
    gpu("H100-80GB", (67e12, 989e12, 3.35e12), 80e9, H100_SHARES, "NVIDIA H100 data sheet, SXM"),
    gpu("H200-141GB", (67e12, 989e12, 4.8e12), 141e9, H100_SHARES, "NVIDIA H200 data sheet, SXM"),
    gpu("H20-96GB", (44e12, 148e12, 4.0e12), 96e9, H100_SHARES, "NVIDIA H20 as resellers list it"),
    gpu("B200-180GB", (75e12, 2250e12, 8.0e12), 180e9, H100_SHARES, "NVIDIA DGX B200 data sheet"),
    gpu("T4-16GB", (8.1e12, 65e12, 0.32e12), 16e9, V100_SHARES, "NVIDIA T4 data sheet"),
    gpu("A10-24GB", (31.2e12, 125e12, 0.6e12), 24e9, A100_SHARES, "NVIDIA A10 data sheet"),
    gpu("L4-24GB", (30.3e12, 121e12, 0.3e12), 24e9, ADA_SHARES, "NVIDIA L4 data sheet"),
    gpu("L40S-48GB", (91.6e12, 362e12, 0.864e12), 48e9, ADA_SHARES, "NVIDIA L40S data sheet"),
    gpu("RTX3090-24GB", (35.6e12, 71e12, 0.936e12), 24e9, A100_SHARES, "NVIDIA GA102 white paper"),
    gpu("RTX4090-24GB", (82.6e12, 165.2e12, 1.008e12), 24e9, ADA_SHARES, "NVIDIA Ada white paper"),
    gpu("RTX4080-16GB", (48.7e12, 97.5e12, 0.717e12), 16e9, ADA_SHARES, "NVIDIA Ada white paper"),
    gpu("GB10-128GB", (31e12, 125e12, 0.273e12), 128e9, ADA_SHARES, "NVIDIA DGX Spark page"),
    gpu("MI300X-192GB", (163.4e12, 1307e12, 5.3e12), 192e9, MI300X_SHARES, "AMD MI300X data sheet"),
    Hardware("cpu", 83e9, 83e9, 12e9, 8e9, CPU, launch_s=2e-6),
)
HARDWARE = {kind.name: kind for kind in KINDS}
"""The built-in devices by name."""


class HardwareFile(Entry):
    """A file with a device."""

    hardware: Hardware


def hardware_named(name: str) -> Hardware:
    """The device of that name in `HARDWARE`, or that of a TOML file.

    The beginning of a name will do where no other begins so, and so will the name that a driver
    gives the device.
    """
    if name.endswith(".toml"):
        return hardware_of(name)
    meant = [known for known in HARDWARE if name and simple(known).startswith(simple(name))]
    meant = meant or [known for known in HARDWARE if may_be(known, name, exactly=True)]
    if len(meant) == 1 or name in HARDWARE:
        return HARDWARE[name if name in HARDWARE else meant[0]]
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"use one of {', '.join(HARDWARE)}"
    raise BadInput(f"hardware '{name}' is no TOML file and not in the table; {hint}")


def hardware_of(path: str) -> Hardware:
    """The device that a file describes: rates of a data sheet, and shares as of a device ``like``
    it, or the roofline; shares that are given count. Processors are those of no other device.
    """
    document = parse_toml(read_text(path, "hardware"), path, "hardware")
    table: Any = document.get("hardware")
    if isinstance(table, dict) and "like" in table:
        like = hardware_named(str(table["like"]))
        usual = {f.name: getattr(like, f.name) for f in fields(like) if f.default is not MISSING}
        document["hardware"] = usual | {"processors": 0} | table
    return check_document(HardwareFile, document, path).hardware


def simple(name: str) -> str:
    """A name in small letters without marks."""
    return "".join(filter(str.isalnum, name.lower()))
