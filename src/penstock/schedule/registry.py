"""Every schedule family by the name that plans and the command line use."""

from penstock.schedule.breadth_first import breadth_first
from penstock.schedule.chimera import chimera
from penstock.schedule.dualpipe import dualpipe
from penstock.schedule.dualpipe_v import dualpipe_v
from penstock.schedule.early_backward import deep_early_backward, gpipe, one_f_one_b
from penstock.schedule.exact import exact
from penstock.schedule.interleaved import interleaved
from penstock.schedule.placement import PlacementStyle
from penstock.schedule.schedule import ScheduleFunction
from penstock.schedule.wavefront import wavefront

__all__ = ["PLACEMENT_STYLES", "SCHEDULES"]

SCHEDULES: dict[str, ScheduleFunction] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "early-backward": deep_early_backward,
    "wavefront": wavefront,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "chimera": chimera,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
    "exact": exact,
}

PLACEMENT_STYLES: dict[str, PlacementStyle] = {
    "interleaved": "looped",
    "breadth-first": "looped",
    "chimera": "mirrored",
    "dualpipe": "mirrored",
    "dualpipe-v": "folded",
}
"""How a family places its stages, where it is not one a device group."""
