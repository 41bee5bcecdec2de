"""Devices that share cores slow one another down: moments that are worked out by hand."""

from dataclasses import replace

from rehearse.rehearsal_cases import emulation, layered, straight, two_hosts

from penstock.cluster.cluster import Cluster
from penstock.rehearse.emulated_links import EmulatedCores
from penstock.rehearse.rehearsal import differences, rehearse
from penstock.simulate.simulation import simulate_plan


def test_devices_with_enough_cores_do_not_slow_one_another_down() -> None:
    cores = EmulatedCores(2)
    cores.begin(0, 4.0, 0.0)
    assert cores.begin(1, 1.0, 1.0) == {0: 4.0, 1: 2.0}


def test_two_on_one_core_take_turns_until_one_has_ended() -> None:
    cores = EmulatedCores(1)
    assert cores.begin(0, 4.0, 0.0) == {0: 4.0}
    # From 1 on each works half as fast. The second ends at 3; then the first has 2 s left.
    assert cores.begin(1, 1.0, 1.0) == {0: 5.0, 1: 3.0}
    # The second begins again at 4, when the first has 1 s left.
    assert cores.begin(1, 5.0, 4.0) == {0: 6.0, 1: 10.0}


def test_one_that_has_ended_takes_no_share_any_more() -> None:
    cores = EmulatedCores(1)
    cores.begin(0, 1.0, 0.0)
    assert cores.begin(1, 1.0, 2.0) == {1: 3.0}


def test_a_beginning_that_is_heard_of_late_counts_from_when_it_was() -> None:
    cores = EmulatedCores(2)
    cores.begin(0, 4.0, 1.0)
    assert cores.begin(1, 2.0, 0.5) == {0: 5.0, 1: 2.5}


def test_a_rehearsal_with_shared_cores_takes_as_long_as_the_simulated_one() -> None:
    hosts = (replace(host, full_speed_devices=1) for host in two_hosts().hosts)
    shared = Cluster("shared cores", tuple(hosts))
    asked = emulation(straight("1f1b"), layered(8), cluster=shared, time_scale=10.0)
    found, apart = rehearse(asked), replace(asked, cluster=two_hosts())
    assert differences(found) == []
    # Each host has one core for two devices; without waiting for it, this would take much less.

    alone_s = simulate_plan(apart.plan, apart.profile, apart.cluster).iteration_s
    assert found.simulated_s > 1.3 * alone_s
    assert found.rehearsed_s > 0.97 * found.simulated_s
