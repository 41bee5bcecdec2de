"""Measures the bytes that each layer saves and needs while it runs, and counts its batch norms."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.capture.batch_norms import CountedNorms
from penstock.capture.layer_graph import StageProgram
from penstock.measure.layer_runs import LayerRun, RunSettings, walk
from penstock.measure.saved_tensors import SavedStorages

__all__ = ["Sizes", "layer_sizes"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one layer at one batch size, and the channels of its batch normalisations."""

    saved_bytes: int
    workspace_bytes: int
    norm_channels: tuple[int, ...] = ()


def layer_sizes(
    programs: Sequence[StageProgram], leaves: Sequence[torch.Tensor], settings: RunSettings
) -> list[Sizes]:
    """Saved and workspace bytes of each layer for the given batch."""
    held = [t for p in programs for t in (*p.module.parameters(), *p.module.buffers())]
    storages = SavedStorages([*held, *leaves])
    sizes: list[Sizes] = []

    def visit(index: int, run: LayerRun) -> tuple[torch.Tensor, ...]:
        # A layer on meta had made-up values only while it was visited.
        storages.ignore([*run.program.module.parameters(), *run.program.module.buffers()])
        before = peak_reset(settings.device)
        with CountedNorms() as norms:
            outputs, saved = storages.bytes_saved_by(run.forward)
        storages.forget([*outputs, *run.received])
        workspace = max(0, peak(settings.device) - before - saved)
        sizes.append(Sizes(saved, workspace, tuple(norms.channels)))
        return outputs

    walk(programs, leaves, settings, visit)
    return sizes


def peak_reset(device: torch.device) -> int:
    """Reset the peak of allocated bytes and return what is allocated now (0 without CUDA)."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device: torch.device) -> int:
    """The peak of allocated bytes since the last reset (0 without CUDA)."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
