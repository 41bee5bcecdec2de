"""The guide to pipelines that meet seldom: its script trains as a plain loop of DiLoCo."""

import copy
import re
from pathlib import Path

import torch
from docs.test_pages import DOCS, blocks_of, succeed, write_files
from safetensors.torch import load_file
from scripts import script_at
from torch import nn

PAGE = DOCS / "guides" / "meet-seldom.md"
ROWS = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])


def test_the_script_trains_as_a_plain_loop_does(tmp_path: Path) -> None:
    write_files(PAGE, tmp_path)
    (command,) = (b.text.splitlines()[0] for b in blocks_of(PAGE) if b.language == "console")
    printed = succeed(command.split(), tmp_path)
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", printed, re.MULTILINE)]
    seldom = script_at(str(tmp_path / "seldom.py"), "seldom_of_the_guide")
    models = [seldom.model() for _ in ROWS]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    outer_model = copy.deepcopy(models[0])
    outer = torch.optim.SGD(outer_model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    assert len(losses) == 20
    for step, found in enumerate(losses):
        x, y = seldom.batch(step)
        own = 0.0
        for model, optimizer, rows in zip(models, optimizers, ROWS, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            own += float(loss.detach()) / 2
        assert abs(found - own) < 1e-4 * own + 1e-6
        if step % 5 == 4:
            with torch.no_grad():
                every = (m.parameters() for m in (outer_model, *models))
                of_all = zip(*every, strict=True)
                for last, first, second in of_all:
                    last.grad = last - (first + second) / 2
                outer.step()
                for model in models:
                    model.load_state_dict(outer_model.state_dict())
    weights: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "weights").glob("*.safetensors"):
        weights |= load_file(file)
    for name, weight in outer_model.named_parameters():
        assert torch.allclose(weights[name], weight, rtol=1e-4, atol=1e-6), name
