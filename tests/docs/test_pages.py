import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from docs.page_programs import run_file

from penstock.runtime.processes.fork_server import ensure_fork_server

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PATH = re.compile(r"`((?:benchmarks|docs|examples|src|tests)/[\w/.-]+\.\w+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMANDS_S = 240
PRINTED = 2e-6
"""Losses are printed with six digits; the sums of a pipeline are in another order."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``file`` is the name in its first line, where it is a file."""

    language: str
    text: str

    @property
    def file(self) -> str:
        match = re.match(r"# ([\w.-]+\.(?:py|toml))\n", self.text)
        return match[1] if match else ""

    @property
    def is_excerpt(self) -> bool:
        """Whether all its lines stand in one of `examples`, which has a test."""
        return any(is_part_of(self.text, path.read_text()) for path in SCRIPTS)

    @property
    def is_example(self) -> bool:
        """Whether the block is to be run with the others of its page."""
        return self.language == "python" and not self.file and not self.is_excerpt


def is_part_of(excerpt: str, whole: str) -> bool:
    """Whether the lines of ``excerpt`` all stand in ``whole``, in the same order."""
    rest = iter(line.strip() for line in whole.splitlines())
    return all(line.strip() in rest for line in excerpt.strip().splitlines())


def blocks_in(text: str) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(text)]


def blocks_of(page: Path) -> list[Block]:
    return blocks_in(page.read_text(encoding="utf-8"))


def texts(blocks: Iterable[Block], language: str) -> list[str]:
    return [block.text for block in blocks if block.language == language]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def write_files(blocks: Iterable[Block], folder: Path) -> None:
    for block in blocks:
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")


def losses_in(printed: str) -> list[float]:
    """The losses of lines such as ``step 3 loss 0.25``."""
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", printed, re.MULTILINE)]


def plain_losses(script: Any, optimizer: Any, steps: int) -> list[float]:
    """The losses of the model of a page's script, which plain torch trains."""
    model, losses = script.model(), list[float]()
    optimizer = optimizer(model.parameters())
    for step in range(steps):
        inputs, targets = script.batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def succeed(command: list[str], folder: Path) -> str:
    scripts = Path(sys.executable).parent
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PET_STANDALONE": "1",  # torchrun's option, so that several find ports of their own
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def command_of(page: Path, script: str) -> str:
    """The command of a page that starts this script on some ranks."""
    lines = (line for block in blocks_of(page) for line in block.text.splitlines())
    (command,) = (line for line in lines if line.startswith("torchrun") and script in line)
    return command


def torchrun_of(page: Path, script: str, folder: Path) -> str:
    """What the command of a page with this script prints, run in ``folder`` as it stands."""
    (folder / "examples").symlink_to(ROOT / "examples")
    return succeed(command_of(page, script).split(), folder)


def run_in_a_fork(folder: Path, file: str) -> None:
    """Run a program as Python would, in a process that has torch and the package imported."""
    ensure_fork_server(())
    process = multiprocessing.get_context("forkserver").Process(
        target=run_file, args=(folder, file)
    )
    process.start()
    process.join(COMMANDS_S)
    process.kill()
    process.join()
    assert process.exitcode == 0, (folder / "printed.txt").read_text(encoding="utf-8")


WITH_EXAMPLES = [page for page in PAGES if any(block.is_example for block in blocks_of(page))]


SLOW = {"large-models.md"}
"""`test_large_models.py` runs more of it, and is slow too."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.name in SLOW else (), id=name_of(page))
        for page in WITH_EXAMPLES
    ],
)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    write_files(blocks_of(page), tmp_path)
    program = "\n\n".join(block.text for block in blocks_of(page) if block.is_example)
    (tmp_path / "examples_of_the_page.py").write_text(program, encoding="utf-8")
    run_in_a_fork(tmp_path, "examples_of_the_page.py")


def test_the_script_of_the_readme_trains_under_torchrun_as_torch_does_alone(tmp_path: Path) -> None:
    readme = ROOT / "README.md"
    assert "Plan(" not in readme.read_text(encoding="utf-8")
    write_files(blocks_of(readme), tmp_path)
    (loss,) = re.fullmatch(r"loss (0\.\d+)\n", torchrun_of(readme, "train.py", tmp_path)).groups()
    own: dict[str, Any] = {}
    exec((tmp_path / "train.py").read_text(encoding="utf-8").partition("pipe = ")[0], own)
    inputs, target = own["batch"]
    optimizer = torch.optim.AdamW(own["model"].parameters())
    plain = torch.zeros(())
    for _ in range(100):
        optimizer.zero_grad()
        plain = torch.nn.functional.cross_entropy(own["model"](inputs), target)
        plain.backward()
        optimizer.step()
    assert float(loss) == pytest.approx(plain.item(), abs=PRINTED)


def links_of(page: Path) -> list[str]:
    return LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def test_links_lead_somewhere() -> None:
    broken = [
        (name_of(page), target)
        for page in PAGES
        for target in links_of(page)
        if not target.startswith(("https://", "http://", "#", "mailto:"))
        and not (page.parent / target.partition("#")[0]).exists()
    ]
    assert broken == []


def anchors_of(page: Path) -> set[str]:
    """What the site calls the headings of ``page``."""
    titles = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    words = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles)
    return {re.sub(r"[-\s]+", "-", title) for title in words}


def test_links_into_a_page_lead_to_a_heading() -> None:
    broken: list[tuple[str, str]] = []
    for page in PAGES:
        for target in links_of(page):
            path, _, anchor = target.partition("#")
            other = page.parent / path if path else page
            if anchor and other.suffix == ".md" and anchor not in anchors_of(other):
                broken.append((name_of(page), target))
    assert broken == []


def test_files_that_are_named_exist() -> None:
    named = [(name_of(p), path) for p in PAGES for path in PATH.findall(p.read_text("utf-8"))]
    assert [(page, path) for page, path in named if not (ROOT / path).is_file()] == []


def test_commands_can_be_copied_as_they_stand() -> None:
    """No prompt before a command: the site's button copies the whole block."""
    blocks = [(name_of(page), block.text) for page in PAGES for block in blocks_of(page)]
    assert [(page, text) for page, text in blocks if text.startswith("$ ")] == []


def test_every_page_is_in_the_navigation_and_the_other_way_round() -> None:
    listed = set(re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert listed == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
