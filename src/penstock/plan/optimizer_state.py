"""State that an optimizer keeps of each parameter, by the common name of the optimizer."""

from math import isfinite

from penstock.errors import BadInput

OPTIMIZERS = {"adamw": 2.0, "adamw-fp32": 6.0, "adamw8bit": 1.0, "sgd": 1.0}
"""Bytes of state for each byte of parameters.

``adamw`` keeps two moments in the type of the parameters, ``sgd`` one (momentum). The others are
for parameters of two bytes. ``adamw-fp32`` keeps both moments and a copy of the parameters in
float32 (Micikevicius et al., Mixed Precision Training, ICLR 2018): 12 bytes for two. ``adamw8bit``
keeps both moments in a byte each (Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
ICLR 2022): 2 bytes for two; the scales of its blocks of 2048 values or fewer are not counted.
"""


def optimizer_state(name: str) -> float:
    """Bytes of state for each byte of parameters of an optimizer: by its name, or the number.

    >>> optimizer_state("adamw-fp32"), optimizer_state("1.5")
    (6.0, 1.5)
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    try:
        found = float(name)
    except ValueError:
        found = -1.0
    if not (isfinite(found) and found >= 0):
        raise BadInput(
            f"optimizer '{name}' is not one of {', '.join(OPTIMIZERS)}; name one, or give its "
            f"bytes of state for each byte of parameters, such as 2"
        )
    return found
