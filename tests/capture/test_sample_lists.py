"""Code that counts or lists the samples in Python is captured for any number of them."""

from typing import Any

import pytest
import torch
import transformers
from plain_training import assert_pipeline_equals_plain
from torch import nn
from torch.nn import functional

from penstock.capture.trace import capture_model
from penstock.errors import CaptureFailed


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 5)

    def hidden(self, values):
        return torch.tanh(self.second(torch.tanh(self.first(values))))


class CountsSamples(_Layers):
    def forward(self, values):
        hidden = self.hidden(values).view(len(values), 2, 3)
        places = torch.arange(len(hidden)) * 0 + 1
        return self.third(hidden.flatten(1) * places[:, None])


class ListsSamples(_Layers):
    def forward(self, values):
        listed = list(self.hidden(values).view(-1, 2, 3))
        assert len(listed) == values.shape[0]
        return self.third(torch.cat(listed, dim=0).view(len(listed), 6))


class StacksSamples(_Layers):
    def forward(self, values):
        return self.third(torch.stack([*self.hidden(values)]))


class UnbindsSamples(_Layers):
    def forward(self, values):
        return self.third(torch.stack(torch.unbind(self.hidden(values)), 0))


def _batch(rows=4):
    return torch.randn(rows, 4, dtype=torch.float64), torch.arange(rows) % 5


MODELS = [CountsSamples, ListsSamples, StacksSamples, UnbindsSamples]


@pytest.mark.parametrize("model", MODELS, ids=lambda kind: kind.__name__)
def test_loss_and_gradients_are_those_of_the_plain_model(model):
    assert_pipeline_equals_plain(model().double(), _batch(), loss=functional.cross_entropy)


def test_the_stages_run_for_any_number_of_samples(pipeline):
    model = ListsSamples().double()
    graph = capture_model(model, _batch(), loss=functional.cross_entropy)
    for rows in (1, 7):
        pipeline.assert_composition_equals_model(
            graph, model, _batch(rows), [1, 2], loss=functional.cross_entropy, rows=rows
        )


def test_a_vision_language_model_that_lists_its_pictures_is_right():
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(
            **sizes, num_key_value_heads=1, vocab_size=40, pad_token_id=0
        ),
        image_token_index=39,
        vision_feature_layer=-1,
    )
    words = torch.randint(2, 38, (4, 8))
    words[:, 1:5] = 39
    labels = words.masked_fill(words == 39, -100)
    labels[0, 6:] = -100
    batch = {
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "pixel_values": torch.randn(4, 3, 8, 8, dtype=torch.float64),
        "labels": labels,
    }
    model = transformers.LlavaForConditionalGeneration(config).double()
    # The model computes its loss in float32.
    assert_pipeline_equals_plain(model, batch, tolerance=1e-6)


class ScalesEachSample(_Layers):
    def forward(self, values):
        return self.third(torch.stack([sample * 2 for sample in self.hidden(values)]))


class JoinsMore(_Layers):
    def forward(self, values):
        return self.third(torch.stack([*self.hidden(values), torch.zeros(6).double()])[:-1])


class JoinsAlongWords(_Layers):
    def forward(self, values):
        hidden = torch.cat([*self.hidden(values).view(-1, 2, 3)], dim=1)
        return self.third(hidden.view(values.shape[0], 6))


@pytest.mark.parametrize("model", [ScalesEachSample, JoinsMore, JoinsAlongWords])
def test_other_uses_of_listed_samples_are_refused_with_the_line(model):
    with pytest.raises(CaptureFailed, match="samples one by one") as caught:
        capture_model(model().double(), _batch(), loss=functional.cross_entropy)
    assert f"{__file__}:{model.forward.__code__.co_firstlineno + 1} `" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_len_is_as_before_after_capture():
    before = len
    capture_model(CountsSamples().double(), _batch(), loss=functional.cross_entropy)
    assert len is before
