"""What tensor parallelism can divide of a model, and what it has to sum for that."""

from dataclasses import dataclass

from penstock.errors import BadInput

__all__ = ["TensorParallelCosts"]


@dataclass(frozen=True)
class TensorParallelCosts:
    """The part of each layer that a tensor group divides, and the group's sums in it.

    ``divided[i]`` is the share of layer ``i``'s compute, and of its parameters' bytes, that t ranks
    divide by t. One forward and backward of the layer takes ``sums[i]`` all-reduces over the group,
    of ``sum_bytes_per_sample[i]`` bytes together for each sample; half of them in the forward.
    ``factors`` are numbers of ranks, each with how many times as long as computed from these
    numbers a group of so many takes, as measured; 1 for groups that were not measured.

    Raises:
        BadInput: not one number for each layer, a share that is not from 0 to 1, a negative number.
    """

    divided: tuple[float, ...]
    sums: tuple[float, ...]
    sum_bytes_per_sample: tuple[float, ...]
    factors: tuple[tuple[int, float], ...] = ()

    def factor(self, ranks: int) -> float:
        """How many times as long as computed a group of ``ranks`` takes."""
        return dict(self.factors).get(ranks, 1.0)

    def __post_init__(self) -> None:
        if len({len(self.divided), len(self.sums), len(self.sum_bytes_per_sample)}) > 1:
            raise BadInput(
                f"tensor_parallel has {len(self.divided)} shares, {len(self.sums)} numbers of sums "
                f"and {len(self.sum_bytes_per_sample)} sizes of sums; give one for each layer"
            )
        if not all(0 <= share <= 1 for share in self.divided):
            raise BadInput(
                f"tensor_parallel.divided is {list(self.divided)}; each layer's share must be from "
                f"0 to 1"
            )
        for value in (*self.sums, *self.sum_bytes_per_sample):
            if not 0 <= value < float("inf"):
                raise BadInput(
                    f"tensor_parallel has {value} sums, or bytes of them, in a layer; it must be "
                    f"finite and >= 0"
                )
        for ranks, factor in self.factors:
            if ranks < 2 or not 0 < factor < float("inf"):
                raise BadInput(
                    f"tensor_parallel.factors has {factor} for groups of {ranks} ranks; groups "
                    f"have at least 2, and a factor must be finite and > 0"
                )
