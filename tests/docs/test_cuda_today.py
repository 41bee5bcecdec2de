"""Every page that someone with GPUs would read says what runs on CUDA today."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = (
    "clusters",
    "elastic",
    "fine-tune-a-part",
    "from-model-to-plan",
    "large-models",
    "loops",
    "other-frameworks",
    "own-training-loop",
    "profiles",
    "rehearse",
    "several-hosts",
    "tensor-groups",
    "train-your-own-model",
    "weights",
)
PAGES = (
    "README.md",
    "docs/start-here.md",
    "docs/benchmarks/hardware.md",
    "docs/benchmarks/largest.md",
    *(f"docs/guides/{guide}.md" for guide in GUIDES),
)


def test_each_page_says_it_and_names_the_place_that_says_more() -> None:
    for page in PAGES:
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        _, found, sentence = text.partition("On CUDA today:")
        assert found, page
        sentence = sentence[:260]
        assert "one H100" in sentence, page
        assert "NCCL between GPUs was never run, only played on a stand-in" in sentence, page
        assert "comparison.md#cuda-today" in sentence, page
    assert "\n## CUDA today\n" in (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
