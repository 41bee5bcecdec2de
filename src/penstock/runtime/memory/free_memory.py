"""How many more bytes this process may allocate on its device, or on the host within its limits."""

import torch

from penstock.machine import FreeMemory, free_host_memory

__all__ = ["FreeMemory", "free_memory"]


def free_memory(device: torch.device) -> FreeMemory:
    """The free memory of a device under the tightest limit; infinite if none is reported."""
    if device.type != "cuda":
        return free_host_memory()
    free, _ = torch.cuda.mem_get_info(device)
    # Memory that torch has reserved but does not use is free for this process.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return FreeMemory(float(free + kept), f"free memory of {device}")
