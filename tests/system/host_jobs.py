"""Jobs for several hosts: models in float64, whose losses the hosts must not change."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
LIMIT_S = 500.0
BATCH_SIZE, LENGTH, VOCABULARY = 16, 12, 64
LEARNING_RATE = 0.05


def gpt2() -> nn.Module:
    """A decoder of four small blocks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, use_cache=False
    )
    settings.resid_pdrop = settings.embd_pdrop = settings.attn_pdrop = 0.0
    return GPT2LMHeadModel(settings).double()


def t5() -> nn.Module:
    """An encoder and a decoder of three small blocks each."""
    from transformers import T5Config, T5ForConditionalGeneration

    settings = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(settings).double()


class Line(nn.Module):
    """Seven small layers and their loss; it is imported in no time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[part for _ in range(6) for part in (nn.Linear(8, 8), nn.Tanh())]
        )
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean square error."""
        return nn.functional.mse_loss(self.last(self.layers(x)), y)


def line() -> nn.Module:
    """A model that computes its own loss."""
    return Line().double()


def points(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Numbers and their means."""
    while True:
        x = drawn_at(seed, start_step, batch_size)[:, :8].double() / VOCABULARY
        yield {"x": x, "y": x.mean(1, keepdim=True)}
        start_step += 1


def tokens(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Texts to continue; each depends on its step alone."""
    while True:
        drawn = drawn_at(seed, start_step, batch_size)
        yield {"input_ids": drawn, "labels": drawn}
        start_step += 1


def words(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Texts to translate into their reverse."""
    while True:
        drawn = drawn_at(seed, start_step, batch_size)
        yield {"input_ids": drawn, "labels": drawn.flip(1)}
        start_step += 1


def drawn_at(seed: int, step: int, batch_size: int) -> torch.Tensor:
    """Numbers of words, few of them often, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    shape = (batch_size, LENGTH)
    return torch.randint(1, VOCABULARY, shape, generator=generator) // 3 + 1


JOBS = {"gpt2": (gpt2, tokens), "line": (line, points), "t5": (t5, words)}


def job_of(name: str, folder: Path, steps: int) -> Path:
    """A job file for ``name``."""
    data = JOBS[name][1].__name__
    granularity = "module" if name == "line" else "block"
    text = f"""
model = "host_jobs:{name}"
data = "host_jobs:{data}"
batch_size = {BATCH_SIZE}
micro_batch_sizes = [2, 4]
steps = {steps}
checkpoint_every = 3
evaluate_every = 0
clip_norm = 0
granularity = "{granularity}"

[optimizer]
name = "sgd"
learning_rate = {LEARNING_RATE}
schedule = "constant"
warm_up_steps = 0
"""
    place = folder / f"{name}.toml"
    place.write_text(text)
    return place


def plain_losses(name: str, steps: int) -> list[float]:
    """The losses of the same training without Penstock, on one device."""
    build, data = JOBS[name]
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    batches = data("train", 0, 0, BATCH_SIZE)
    losses: list[float] = []
    for _ in range(steps):
        result = model(**next(batches))
        loss = result if isinstance(result, torch.Tensor) else result.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def of_ranks(**more: str) -> dict[str, str]:
    """The environment of a rank, which finds the tests' jobs."""
    here = str(Path(__file__).parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **more}


def ended(started: Sequence["subprocess.Popen[str]"]) -> list[tuple[int, str]]:
    """Exit code and standard error of each process; none is left."""
    try:
        said = [process.communicate(timeout=LIMIT_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def started_ranks(*commands: Sequence[object], **more: str) -> list[tuple[int, str]]:
    """Exit code and errors of ranks, each with its command of penstock, as torchrun starts them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    size = str(len(commands))
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, **place, **more}
    return ended(
        [
            subprocess.Popen(
                [PENSTOCK, *map(str, command)],
                env=of_ranks(RANK=str(rank), LOCAL_RANK=str(rank), **world),
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, command in enumerate(commands)
        ]
    )
