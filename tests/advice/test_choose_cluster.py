"""The cheapest cluster in time, and what a plan trains each second."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.advice.assessment import PlannedPipeline
from penstock.advice.choose_cluster import choose_cluster, plan_on_clusters, samples_with_tokens
from penstock.cluster.cluster import Cluster
from penstock.cluster.toml_file import find_cluster, read_cluster, write_cluster
from penstock.errors import BadInput, Infeasible
from penstock.plan.throughput import throughput_of
from penstock.profile.json_file import read_profile, write_profile
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.simulation import simulate_plan

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "clusters.md"


def priced(cluster: Cluster, name: str, price: float, speed: float = 1.0) -> Cluster:
    hosts = tuple(
        replace(
            host,
            price_per_hour=price,
            devices=tuple(
                replace(device, speed=speed, peak_flops_per_s=1e12) for device in host.devices
            ),
        )
        for host in cluster.hosts
    )
    return replace(cluster, name=name, hosts=hosts)


def test_the_cheapest_in_time_is_chosen(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    slow, fast = (
        priced(small_cluster, "slow", 1.0),
        priced(small_cluster, "fast", 5.0, speed=2.0),
    )
    choices = plan_on_clusters(small_profile, [fast, slow], 16, 1e6, planner="gpipe")
    assert [choice.cluster.name for choice in choices] == ["slow", "fast"]
    for choice in choices:
        assert isinstance(choice.outcome, PlannedPipeline)
        alone = simulate_plan(choice.outcome.plan, small_profile, choice.cluster)
        assert choice.hours == pytest.approx(alone.iteration_s * 1e6 / 16 / 3600)
        assert choice.price == pytest.approx(choice.hours * choice.cluster.price_per_hour)
    assert choose_cluster(choices).cluster.name == "slow"
    between = (choices[0].hours + choices[1].hours) / 2
    assert choose_cluster(choices, between).cluster.name == "fast"
    with pytest.raises(Infeasible, match=r"within .* the fastest, 'fast', takes"):
        choose_cluster(choices, choices[1].hours / 2)


def test_a_cluster_on_which_nothing_fits_comes_last(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    hosts = tuple(
        replace(host, devices=tuple(replace(device, memory_bytes=1e3) for device in host.devices))
        for host in small_cluster.hosts
    )
    tiny = priced(replace(small_cluster, hosts=hosts), "tiny", 0.01)
    large = priced(small_cluster, "large", 1.0)
    choices = plan_on_clusters(small_profile, [tiny, large], 16, 1e6, planner="gpipe")
    assert [choice.cluster.name for choice in choices] == ["large", "tiny"]
    assert choose_cluster(choices).cluster.name == "large"
    with pytest.raises(Infeasible, match="cluster 'tiny': "):
        choose_cluster(choices[1:])


def test_what_is_missing_is_named(small_profile: ModelProfile, small_cluster: Cluster) -> None:
    both = [small_cluster, priced(small_cluster, "priced", 1.0)]
    with pytest.raises(BadInput, match=r"cluster 'four' has no prices, and others have; add price"):
        plan_on_clusters(small_profile, both, 16, 1e6)
    with pytest.raises(BadInput, match=r"how many tokens a sample has; add tokens_per_sample"):
        samples_with_tokens(small_profile, 1e9)


def test_without_prices_the_fastest_is_chosen(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    slow, fast = (priced(small_cluster, f"by {s:g}", 0.0, speed=s) for s in (1.0, 2.0))
    choices = plan_on_clusters(small_profile, [slow, fast], 16, 1e6, planner="gpipe")
    assert choose_cluster(choices).cluster.name == "by 2"
    assert [choice.price for choice in choices] == [0.0, 0.0]


def test_times_of_one_device_are_not_those_of_another(
    small_profile: ModelProfile, penstock: Callable[..., Any], tmp_path: Path
) -> None:
    profile = replace(small_profile, device="A100-80GB")
    with pytest.raises(BadInput, match=r"are of A100-80GB, and .* 'rtx4090-4' has RTX4090-24GB; "):
        plan_on_clusters(profile, [find_cluster("rtx4090-4")], 16, 1e6, planner="gpipe")
    # The speeds of this cluster are relative to a device that is neither there nor the profile's.
    with pytest.raises(BadInput, match="has H100-80GB; name a job"):
        plan_on_clusters(profile, [find_cluster("h100-pod-16")], 16, 1e6, planner="gpipe")
    # Here they are relative to the profile's own.
    mixed = replace(small_profile, device="V100-16GB")
    assert plan_on_clusters(mixed, [find_cluster("mixed-gpus")], 16, 1e6, planner="gpipe")
    write_profile(profile, tmp_path / "p.json")
    command = ("choose", str(tmp_path / "p.json"), "--clusters", "rtx4090-4", "--batch", "16")
    asked = ("--samples", "1e6", "--planner", "gpipe")
    assert penstock(*command, *asked).code == 2
    told = penstock(*command, *asked, "--foreign-times")
    assert told.code == 0, told.errors
    assert "rtx4090-4: the times of A100-80GB stand for RTX4090-24GB" in told.errors
    assert "fastest: rtx4090-4" in told.output and "A100-80GB" in told.output


def test_rates_follow_their_definitions(
    small_profile: ModelProfile, small_cluster: Cluster, tmp_path: Path
) -> None:
    profile = replace(small_profile, tokens_per_sample=100.0, flops_per_sample=2e9)
    cluster = priced(small_cluster, "priced", 7.2)
    write_profile(profile, tmp_path / "p.json")
    write_cluster(cluster, tmp_path / "c.toml")
    profile, cluster = read_profile(tmp_path / "p.json"), read_cluster(tmp_path / "c.toml")
    rates = throughput_of(profile, cluster, range(2), 16, 0.5)
    assert (rates.samples_per_s, rates.tokens_per_s) == (32.0, 3200.0)
    # Two devices of 1e12 operations a second, which do 32 times 2e9.
    assert rates.mfu == pytest.approx(0.032)
    assert rates.price_per_million == pytest.approx(7.2 * 1e6 / 3200 / 3600)
    unknown = throughput_of(small_profile, small_cluster, range(2), 16, 0.5)
    assert (unknown.tokens_per_s, unknown.mfu, unknown.price_per_hour) == (0.0, 0.0, 0.0)
    assert str(unknown) == "32.0 samples/s"


def test_the_command_of_the_guide_runs(
    penstock: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text(encoding="utf-8")
    for name, file in re.findall(r"^# ([\w-]+\.toml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(file, encoding="utf-8")
    command = re.findall(r"^penstock (choose .+)$", text, re.MULTILINE)[0]
    answer = penstock(*shlex.split(command), "--planner", "gpipe", "--json")
    assert answer.code == 0, answer.errors
    found = json.loads(answer.output)
    assert {found["chosen"]} < {each["cluster"] for each in found["clusters"]}
    assert all(each["tokens_per_s"] > 0 and each["price"] > 0 for each in found["clusters"])
    assert penstock(*shlex.split(command), "--planner", "gpipe", "--within", "0.01").code == 3
