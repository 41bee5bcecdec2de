"""Our files are those of the package safetensors, and damaged ones are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import BadInput
from penstock.runtime.weights.safetensors_file import read_header, read_into, write_tensors

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 10
    kinds = {str(dtype): values.to(dtype) for dtype in DTYPES}
    return {
        **kinds,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "columns": values.t(),
        "é": values[0].clone(),
    }


def test_the_package_reads_what_is_written(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write_tensors(tmp_path / "ours.safetensors", tensors)
    found = load_file(tmp_path / "ours.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_what_the_package_writes_is_read(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    tensors["columns"] = tensors["columns"].contiguous()
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    stored = read_header(tmp_path / "theirs.safetensors")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        target = torch.empty(stored[name].shape, dtype=stored[name].dtype)
        read_into([(stored[name], target)])
        assert target.dtype == tensor.dtype
        assert torch.equal(target, tensor), name


def test_values_take_the_type_and_the_place_that_they_are_read_into(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write_tensors(tmp_path / "ours.safetensors", tensors)
    stored = read_header(tmp_path / "ours.safetensors")
    half = torch.empty(3, 5, dtype=torch.bfloat16)
    columns = torch.empty(5, 3).t()
    read_into([(stored["torch.float32"], half), (stored["torch.float64"], columns)])
    assert torch.equal(half, tensors["torch.float32"].bfloat16())
    assert torch.equal(columns, tensors["torch.float64"].float())


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (lambda data: data[:-1], "file not fully covered"),
        (lambda data: data.replace(b"[3]", b"[7]"), "invalid shape, data type, or offset"),
        (lambda data: data[:8] + b"}" + data[9:], "expected value"),
        (lambda data: b"", "header too small"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1", "header too large"),
    ],
    ids=["cut off", "another size", "no JSON", "empty", "text"],
)
def test_a_damaged_file_is_refused(
    damaged: Callable[[bytes], bytes], why: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"a": torch.zeros(3), "b": torch.ones(2)})
    path.write_bytes(damaged(path.read_bytes()))
    with pytest.raises(BadInput, match=f"model.safetensors' is not a whole .*{why}"):
        read_header(path)


def test_a_type_that_is_not_trained_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    scales = torch.ones(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file({"scales": scales}, path)
    with pytest.raises(BadInput, match=r"'scales' of .*has type F8_E8M0, which is not trained"):
        read_header(path)
    with pytest.raises(BadInput, match=r"'scales' has type .*e8m0fnu, which is not saved"):
        write_tensors(path, {"scales": scales})


def test_a_file_may_be_read_by_those_that_the_mask_of_modes_lets_read(tmp_path: Path) -> None:
    path, plain = tmp_path / "model.safetensors", tmp_path / "plain"
    plain.touch()
    write_tensors(path, {"a": torch.ones(2)})
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_file_that_has_become_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"a": torch.ones(2)})
    stored = read_header(path)["a"]
    path.unlink()
    with pytest.raises(BadInput, match=r"model.safetensors' cannot be read: No such file"):
        read_into([(stored, torch.empty(2))])
    path.write_bytes(b"")
    with pytest.raises(BadInput, match=r"model.safetensors' is not a whole safetensors file"):
        read_into([(stored, torch.empty(2))])
