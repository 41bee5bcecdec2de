"""Devices that stream their messages: each passes beside the action that makes it."""

import pytest
from reproduction.balanced_stages import play_balanced

from penstock.simulate.simulation import Prediction
from penstock.timeline.timeline import Event


def spans(played: Prediction, *kinds: str, device: int) -> list[tuple[float, float]]:
    """Start and end of a device's events of some kinds, in order of time."""
    found = (e for e in played.timeline.events if e.kind in kinds and e.device == device)
    return sorted((event.start_s, event.end_s) for event in found)


def first(played: Prediction, kind: str, device: int) -> Event:
    """The first event of a kind on a device."""
    return next(e for e in played.timeline.events if e.kind == kind and e.device == device)


@pytest.mark.parametrize(("transfer_s", "arrives_s"), [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (3, 3)])
def test_a_message_arrives_with_the_later_of_its_end_and_that_of_the_pass(
    transfer_s: float, arrives_s: float
) -> None:
    played = play_balanced("gpipe", 2, 1, transfer_s=transfer_s, streams=True)
    assert spans(played, "F", device=1) == [(arrives_s, arrives_s + 1)]
    # The gradient of a backward of 2 s is sent in the same way.
    begun_s = arrives_s + 1
    assert spans(played, "B", device=0)[0][0] == begun_s + max(2.0, transfer_s)
    if transfer_s:
        assert spans(played, "SEND", device=0) == [(0.0, transfer_s)]
        assert spans(played, "SEND", device=1) == [(begun_s, begun_s + transfer_s)]


def test_messages_of_passes_shorter_than_they_are_wait_for_the_link() -> None:
    played = play_balanced("gpipe", 2, 3, transfer_s=1.5, streams=True)
    assert spans(played, "SEND", device=0) == [(0.0, 1.5), (1.5, 3.0), (3.0, 4.5)]
    assert [start_s for start_s, _ in spans(played, "F", device=1)] == [1.5, 3.0, 4.5]


def test_a_pass_that_shares_its_device_holds_its_message_back() -> None:
    """The last stage runs a backward of 2 s beside a forward of 1 s, so both take 3 s."""
    played = play_balanced("fbp-as", 3, 8, transfer_s=0.5, streams=True, separate_links=True)
    assert spans(played, "B", device=2)[0] == pytest.approx((3.0, 6.0))
    assert spans(played, "SEND", device=2)[0] == pytest.approx((3.0, 3.5))
    assert spans(played, "B", device=1)[0] == pytest.approx((6.0, 8.0))


def test_devices_that_do_not_stream_send_after_the_pass() -> None:
    played = play_balanced("1f1b-as", 2, 1, transfer_s=0.5)
    assert first(played, "SEND", 0).start_s == 1.0
    assert first(played, "F", 1).start_s == 1.5
