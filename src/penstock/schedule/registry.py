"""Every schedule family by the name that plans and the command line use."""

from penstock.schedule.early_backward import deep_early_backward, gpipe, one_f_one_b
from penstock.schedule.placement import PlacementStyle
from penstock.schedule.schedule import ScheduleFunction
from penstock.schedule.wavefront import wavefront

__all__ = ["PLACEMENT_STYLES", "SCHEDULES"]

SCHEDULES: dict[str, ScheduleFunction] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "early-backward": deep_early_backward,
    "wavefront": wavefront,
}

PLACEMENT_STYLES: dict[str, PlacementStyle] = {}
"""How a family places its stages, where it is not one a device group."""
