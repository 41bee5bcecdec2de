"""Architectures of transformers as the census judges them: a sample; all quick ones when slow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from capture.stand_in_census_cases import CENSUS, judging

RECORDED = {row["name"]: row for row in json.loads((CENSUS / "results.json").read_text())["rows"]}
SAMPLE = (
    *("BartForCausalLM", "BioGptForCausalLM", "BloomForCausalLM", "CohereForCausalLM"),
    *("CTRLLMHeadModel", "DeepseekV3ForCausalLM", "DiffLlamaForCausalLM", "DogeForCausalLM"),
    *("FalconForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM"),
    *("GPTNeoForCausalLM", "GPTNeoXForCausalLM", "LlamaForCausalLM", "MixtralForCausalLM"),
    *("MptForCausalLM", "OlmoeForCausalLM", "OPTForCausalLM", "PhiForCausalLM"),
    *("Qwen3ForCausalLM", "StableLmForCausalLM", "AlbertForMaskedLM", "BertForMaskedLM"),
    *("ConvBertForMaskedLM", "DistilBertForMaskedLM", "FNetForMaskedLM", "MPNetForMaskedLM"),
    *("NystromformerForMaskedLM", "RoFormerForMaskedLM", "SqueezeBertForMaskedLM"),
    *("MarianMTModel", "T5ForConditionalGeneration", "CLIPForImageClassification"),
    *("ConvNextForImageClassification", "ResNetForImageClassification"),
    *("ViTForImageClassification", "WhisperForConditionalGeneration"),
    *("Wav2Vec2ForCTC", "BlipForConditionalGeneration", "MusicgenForCausalLM"),
    *("Qwen2VLForConditionalGeneration", "Idefics3ForConditionalGeneration"),
)
"""Small and of distinct kinds: attention, mixtures of experts, convolutions, state spaces, ..."""

ALWAYS = {
    *("GPT2LMHeadModel", "LlamaForCausalLM", "DeepseekV3ForCausalLM", "FalconForCausalLM"),
    *("BertForMaskedLM", "ConvBertForMaskedLM", "FNetForMaskedLM", "T5ForConditionalGeneration"),
    *("CLIPForImageClassification", "ConvNextForImageClassification", "Wav2Vec2ForCTC"),
    *("WhisperForConditionalGeneration", "BlipForConditionalGeneration"),
}
"""One of each kind; the rest of the sample is slow."""


QUICK_S = 5.0
"""Two thirds of all architectures took no longer when they were recorded."""

ELSEWHERE = "torchvision", "timm"
"""Their families are judged in an environment of their own, with another torch."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in SAMPLE],
)
def test_an_architecture_is_right_as_recorded(name: str) -> None:
    recorded = RECORDED[name]
    found = judging().judge(getattr(transformers, name), recorded["head"])
    assert found["outcome"] == recorded["outcome"], found
    assert found["outcome"].startswith("right")
    assert found["batch"] == recorded["batch"]


def test_nothing_is_recorded_as_wrong_or_as_a_crash_and_refusals_are_one_line() -> None:
    assert [r["name"] for r in RECORDED.values() if r["outcome"] in ("WRONG", "crash")] == []
    refused = [r for r in RECORDED.values() if r["outcome"] == "refused"]
    assert all(r["reason"] and "\n" not in r["reason"] for r in refused)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_quick_architecture_is_as_recorded(tmp_path: Path) -> None:
    """The others take hours; `benchmarks/models.py` judges them too."""
    out = tmp_path / "results.json"
    here = {name: row for name, row in RECORDED.items() if row["head"] not in ELSEWHERE}
    quick = [name for name, row in here.items() if row["wall_s"] <= QUICK_S]
    assert len(quick) > len(here) / 2
    script = str(CENSUS.with_suffix(".py"))
    subprocess.run([sys.executable, script, "--out", str(out), "--only", *quick], check=True)
    found = {row["name"]: row["outcome"] for row in json.loads(out.read_text())["rows"]}
    assert found == {name: RECORDED[name]["outcome"] for name in quick}
