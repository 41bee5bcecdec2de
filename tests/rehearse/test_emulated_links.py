"""The rules of emulated links, moment by moment, with figures that are worked out by hand."""

from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.rehearse.emulated_links import EmulatedLinks, LinkTransfer, message_between, sum_among

HOSTS = tuple(
    Host(name, (Device("gpu", 1e9),) * 2, link_bytes_per_s=100.0, port_bytes_per_s=10.0)
    for name in "ab"
)
CLUSTER = Cluster("two hosts", HOSTS)


def message(source: int, target: int, size: float, cluster: Cluster = CLUSTER) -> LinkTransfer:
    return message_between(cluster, (source, target), size, 1, (0, 1, 0), "message", 1.0)


def spans(
    links: EmulatedLinks, *offers: tuple[LinkTransfer, float]
) -> list[tuple[int, float, float]]:
    """The sender, start and end of everything offered, in the order of the starts."""
    begun = [started for offer in offers for started in links.offer(*offer)]
    while links.next_end_s < float("inf"):
        begun += links.advance(links.next_end_s)
    return [(s.transfer.source, s.start_s, s.end_s) for s in begun]


def test_messages_of_two_devices_take_turns_on_the_port_of_their_host() -> None:
    both = (message(0, 2, 20.0), 0.0), (message(1, 3, 20.0), 0.5)
    assert spans(EmulatedLinks(), *both) == [(0, 0.0, 2.0), (1, 2.0, 4.0)]


def test_a_message_that_must_wait_holds_up_no_other() -> None:
    found = spans(
        EmulatedLinks(),
        (message(0, 2, 20.0), 0.0),
        (message(1, 2, 20.0), 0.1),  # waits for the port
        (message(1, 0, 50.0), 0.2),  # inside the host: free
    )
    assert found == [(0, 0.0, 2.0), (1, 0.2, 0.7), (1, 2.0, 4.0)]


def test_the_oldest_goes_first_and_a_sum_goes_after_messages() -> None:
    total = sum_among(CLUSTER, (0, 2), 10.0, 0, "sum", 1.0)
    found = spans(
        EmulatedLinks(),
        (message(0, 2, 20.0), 0.0),
        (total, 0.1),
        (message(1, 3, 10.0), 0.2),
    )
    # The ring of two sends half of the bytes twice each way: 10 bytes at 10 bytes a second.
    assert found == [(0, 0.0, 2.0), (1, 2.0, 3.0), (-1, 3.0, 4.0)]


def test_late_news_of_a_message_does_not_make_it_late() -> None:
    links = EmulatedLinks()
    links.advance(5.0)
    assert spans(links, (message(0, 2, 20.0), 1.0)) == [(0, 1.0, 3.0)]


def test_both_directions_of_a_half_duplex_link_take_turns() -> None:
    half = Cluster("half", tuple(replace(host, half_duplex=True) for host in HOSTS))
    both = (message(0, 2, 20.0, half), 0.0), (message(2, 0, 20.0, half), 0.0)
    assert spans(EmulatedLinks(), *both) == [(0, 0.0, 2.0), (2, 2.0, 4.0)]
    assert spans(EmulatedLinks(), (message(0, 2, 20.0), 0.0), (message(2, 0, 20.0), 0.0)) == [
        (0, 0.0, 2.0),
        (2, 0.0, 2.0),
    ]


def test_every_pair_has_a_link_of_its_own_where_the_host_says_so() -> None:
    apart = Cluster("apart", (replace(HOSTS[0], separate_links=True), HOSTS[1]))
    offers = (message(0, 1, 100.0, apart), 0.0), (message(1, 0, 100.0, apart), 0.0)
    assert spans(EmulatedLinks(), *offers) == [(0, 0.0, 1.0), (1, 0.0, 1.0)]


@pytest.mark.parametrize("tensors", [1, 3])
def test_every_tensor_of_a_message_has_the_latency(tensors: int) -> None:
    slow = Cluster("slow", tuple(replace(host, port_latency_s=0.5) for host in HOSTS))
    found = message_between(slow, (0, 2), 20.0, tensors, (0, 1, 0), "message", time_scale=2.0)
    assert found.seconds == 2 * (0.5 * tensors + 2.0)
