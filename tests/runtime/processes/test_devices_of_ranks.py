"""All ranks agree on what their devices make possible, or each says why they cannot run."""

from runtime.processes.device_cases import joined

from penstock.runtime.processes.launch import launch_workers

ONE, TWO = ("a", "a"), ("a", "b")


def test_ranks_agree_on_a_backend_or_are_refused_in_one_line() -> None:
    cases = {
        "own GPUs": (ONE, ("GPU-0", "GPU-1")),
        "own GPUs, two hosts": (TWO, ("GPU-0", "GPU-0")),
        "one GPU": (ONE, ("GPU-0", "GPU-0")),
        "none": (TWO, ("cpu", "cpu")),
        "mixed": (TWO, ("GPU-0", "cpu")),
        "missing": (TWO, ("GPU-0", "")),
        "without NCCL": (TWO, ("GPU-0", "GPU-1 without NCCL")),
    }
    first, second = launch_workers(joined, ([*cases.values()],), workers=2)
    assert first == second, "all ranks say the same"
    found = dict(zip(cases, first, strict=True))
    assert found.pop("own GPUs") == found.pop("own GPUs, two hosts") == "nccl"
    assert found.pop("one GPU") == found.pop("none") == "gloo"
    for case, (thing, remedy) in {
        "mixed": ("rank 1 computes on cpu of host 'b' and rank 0 on cuda:0 of host 'a'", "'cpu'"),
        "missing": ("rank 1: no GPU on host b", ""),
        "without NCCL": ("of rank 1 (cuda:0 of host 'b') has no NCCL", "install a build of torch"),
    }.items():
        said = found.pop(case)
        assert thing in said and remedy in said and "\n" not in said, said
    assert not found


def test_ranks_share_a_gpu_on_one_host_only() -> None:
    hosts, gpus = ("a", "a", "b"), ("GPU-0", "GPU-0", "GPU-0")
    (said,) = {said for (said,) in launch_workers(joined, ([(hosts, gpus)],), workers=3)}
    assert "ranks 0, 1 share one GPU" in said and "as many ranks as it has GPUs" in said
