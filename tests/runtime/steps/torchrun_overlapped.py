"""Started by torchrun: compares steps that are checked afterwards with plain ones."""

import json

import torch
import torch.distributed as dist
from runtime.steps.overlapped_cases import Case, compare


def main() -> None:
    """Rank 0 prints what is wrong on any rank, and how many steps were undone."""
    torch.set_num_threads(1)
    found = compare([Case("zb-h2", (1, 1), clip=0.5, transport="process-groups")])
    everywhere: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, [text for what, _ in found.values() for text in what])
    if dist.get_rank() == 0:
        undone = sum(count for _, count in found.values())
        print(json.dumps({"wrong": everywhere[0] + everywhere[1], "undone": undone}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
