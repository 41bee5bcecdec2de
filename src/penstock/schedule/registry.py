"""Every schedule family by the name that plans and the command line use."""

from penstock.schedule.asynchronous import (
    pipedream,
    pipedream_2bw,
    pipedream_vertical_sync,
    pipeoptim,
    spectrain,
    spectrain_v2,
    vanilla,
    xpipe,
)
from penstock.schedule.automatic_zero_bubble import zero_bubble
from penstock.schedule.bapipe_orders import (
    fbp_as,
    one_f_one_b_as,
    one_f_one_b_sno,
    one_f_one_b_so,
)
from penstock.schedule.breadth_first import breadth_first
from penstock.schedule.chimera import chimera
from penstock.schedule.dualpipe import dualpipe
from penstock.schedule.dualpipe_v import dualpipe_v
from penstock.schedule.early_backward import deep_early_backward, gpipe, one_f_one_b
from penstock.schedule.exact import exact
from penstock.schedule.hanayo import hanayo
from penstock.schedule.interleaved import interleaved
from penstock.schedule.list_scheduler import list_schedule
from penstock.schedule.placement import PlacementStyle
from penstock.schedule.schedule import ScheduleFunction
from penstock.schedule.v_schedules import v_half, v_min, zb_v
from penstock.schedule.wavefront import wavefront
from penstock.schedule.zero_bubble_handcrafted import zb_h1, zb_h2

__all__ = ["ASYNCHRONOUS", "PLACEMENT_STYLES", "PROVEN_BY_SEARCH", "SCHEDULES", "TWO_ROUNDS"]

SCHEDULES: dict[str, ScheduleFunction] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "early-backward": deep_early_backward,
    "wavefront": wavefront,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "hanayo": hanayo,
    "chimera": chimera,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
    "1f1b-as": one_f_one_b_as,
    "1f1b-sno": one_f_one_b_sno,
    "1f1b-so": one_f_one_b_so,
    "fbp-as": fbp_as,
    "vanilla": vanilla,
    "pipedream": pipedream,
    "pipedream-vertical-sync": pipedream_vertical_sync,
    "2bw": pipedream_2bw,
    "spectrain": spectrain,
    "spectrain-v2": spectrain_v2,
    "xpipe": xpipe,
    "pipeoptim": pipeoptim,
    "list": list_schedule,
    "zero-bubble": zero_bubble,
    "exact": exact,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
}

PLACEMENT_STYLES: dict[str, PlacementStyle] = {
    "interleaved": "looped",
    "breadth-first": "looped",
    "hanayo": "folded",
    "chimera": "mirrored",
    "dualpipe": "mirrored",
    "dualpipe-v": "folded",
    "zb-v": "folded",
    "v-half": "folded",
    "v-min": "folded",
}
"""How a family places its stages, where it is not one a device group."""

TWO_ROUNDS: frozenset[str] = frozenset({"dualpipe-v", "zb-v", "v-half", "v-min"})
"""Families that place exactly two stages on each device group."""

ASYNCHRONOUS: frozenset[str] = frozenset(
    {
        "vanilla",
        "pipedream",
        "pipedream-vertical-sync",
        "2bw",
        "spectrain",
        "spectrain-v2",
        "xpipe",
        "pipeoptim",
    }
)
"""Families that update weights without a flush: no bubble, but not the gradients of one device."""

PROVEN_BY_SEARCH: frozenset[str] = frozenset({"exact"})
"""Families that search for a proof, which ends in time on small pipelines only."""
