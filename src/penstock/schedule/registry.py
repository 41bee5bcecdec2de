"""Every schedule family, by the name that plans and the command line use."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import cast

from penstock.errors import BadInput
from penstock.schedule.family import Family


class Families(Mapping[str, Family]):
    """Records by name; each module is imported when its record is first used.

    So a plan can look up the placement of its schedule without loading all others.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = places
        self.known: dict[str, Family] = {}

    def __getitem__(self, name: str) -> Family:
        if name not in self.known:
            if name not in self.places:
                return self.installed[name]
            module, _, record = self.places[name].rpartition(".")
            found = vars(import_module(f"penstock.schedule.{module}"))[record]
            self.known[name] = cast("Family", found)
        return self.known[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.places, **self.known})

    def __len__(self) -> int:
        return len({**self.places, **self.known})

    def __contains__(self, name: object) -> bool:
        return name in self.places or name in self.known or name in self.installed

    def add(self, name: str, schedule: object) -> None:
        """Register a schedule from outside as ``name``, in this process."""
        from penstock.schedule.outside import checked_family

        if name in self.places:
            raise BadInput(f"schedule '{name}' is one of the package; give yours another name")
        self.known[name] = checked_family(name, schedule)

    @cached_property
    def installed(self) -> Mapping[str, Family]:
        """The schedules of other packages: their entry points ``penstock.schedules``.

        They are looked up with the first name that is no other schedule's.
        """
        from importlib.metadata import entry_points

        from penstock.schedule.outside import called

        points = [p for p in entry_points(group="penstock.schedules") if p.name not in self.places]
        for point in points:
            self.add(point.name, called(f"entry point '{point.value}'", point.load, object))
        return {point.name: self.known[point.name] for point in points}


FAMILIES = Families(
    {
        "gpipe": "families.early_backward.GPIPE",
        "1f1b": "families.early_backward.ONE_F_ONE_B",
        "early-backward": "families.early_backward.EARLY_BACKWARD",
        "wavefront": "families.wavefront.WAVEFRONT",
        "interleaved": "families.interleaved.INTERLEAVED",
        "breadth-first": "families.interleaved.BREADTH_FIRST",
        "hanayo": "families.hanayo.HANAYO",
        "chimera": "families.chimera.CHIMERA",
        "dualpipe": "families.dualpipe.DUALPIPE",
        "dualpipe-v": "families.dualpipe.DUALPIPE_V",
        "1f1b-as": "families.early_backward.ONE_F_ONE_B",
        "1f1b-sno": "families.early_backward.ONE_F_ONE_B",
        "1f1b-so": "families.bapipe_orders.ONE_F_ONE_B_SO",
        "fbp-as": "families.bapipe_orders.FBP_AS",
        "vanilla": "families.asynchronous.VANILLA",
        "pipedream": "families.asynchronous.PIPEDREAM",
        "pipedream-vertical-sync": "families.asynchronous.PIPEDREAM_VERTICAL_SYNC",
        "2bw": "families.asynchronous.PIPEDREAM_2BW",
        "spectrain": "families.asynchronous.SPECTRAIN",
        "spectrain-v2": "families.asynchronous.SPECTRAIN_V2",
        "xpipe": "families.asynchronous.XPIPE",
        "pipeoptim": "families.asynchronous.PIPEOPTIM",
        "list": "searched.list_scheduler.LIST",
        "zero-bubble": "searched.automatic_zero_bubble.ZERO_BUBBLE",
        "zb-h1": "families.zero_bubble_handcrafted.ZB_H1",
        "zb-h2": "families.zero_bubble_handcrafted.ZB_H2",
        "zb-v": "families.v_schedules.ZB_V",
        "v-half": "families.v_schedules.V_HALF",
        "v-min": "families.v_schedules.V_MIN",
    }
)
"""Values are paths of records, relative to `penstock.schedule`."""
