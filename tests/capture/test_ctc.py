"""Speech models with CTC heads: the loss is kept whole, its reduction is not."""

import pytest
import torch
import transformers
from plain_training import assert_pipeline_equals_plain
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import CaptureFailed

CLASSES = 12
CONFIG = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 3),
    "num_feat_extract_layers": 2,
    "vocab_size": CLASSES,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    **dict.fromkeys(["hidden_dropout", "attention_dropout", "activation_dropout"], 0.0),
    **dict.fromkeys(["feat_proj_dropout", "final_dropout", "layerdrop"], 0.0),
    **dict.fromkeys(["mask_time_prob", "mask_feature_prob"], 0.0),
    "pad_token_id": 0,
}


def _targets():
    targets = torch.randint(1, CLASSES, (4, 5))
    targets[0, 3:] = -100
    targets[2, 1:] = -100
    return targets


def test_speech_models_with_ctc_heads_are_right():
    # Their loss is the sum over the batch, unless told otherwise.
    config = transformers.Wav2Vec2Config(**CONFIG)
    model = transformers.Wav2Vec2ForCTC(config).double()
    batch = {"input_values": torch.randn(4, 200, dtype=torch.float64), "labels": _targets()}
    # The loss computes log probabilities in float32, whatever the model's type.
    assert_pipeline_equals_plain(model, batch, tolerance=1e-5)


class Recogniser(nn.Module):
    def __init__(self, reduction="mean", zero_infinity=True):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, CLASSES)
        self.loss = nn.CTCLoss(reduction=reduction, zero_infinity=zero_infinity)

    def forward(self, sounds, lengths, targets):
        hidden = torch.tanh(self.second(torch.tanh(self.first(sounds))))
        scores = functional.log_softmax(self.third(hidden), -1).transpose(0, 1)
        count = (targets >= 0).sum(1)
        loss = self.loss(scores, targets.clamp_min(0), lengths, count)
        return loss.mean() if loss.dim() else loss


def _sounds():
    # The third sample is shorter than its targets: its loss is infinite, or zero.
    return torch.randn(4, 9, 6, dtype=torch.float64), torch.tensor([9, 7, 9, 3]), _targets()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_reduction_is_exact(reduction):
    assert_pipeline_equals_plain(Recogniser(reduction).double(), _sounds())


def test_predictions_need_no_targets():
    config = transformers.HubertConfig(**CONFIG, ctc_loss_reduction="mean")
    model = transformers.HubertForCTC(config).double()
    sounds = torch.randn(4, 200, dtype=torch.float64)
    graph = capture_model(model, {"input_values": sounds, "labels": _targets()}).without_loss()
    module = graph.stage(range(len(graph.layer_names))).module
    (leaf,) = graph.known_leaves({"input_values": sounds}).values()
    torch.testing.assert_close(module(leaf)[0], model.train()(sounds).logits)


class FixedLengths(Recogniser):
    def forward(self, sounds, lengths, targets):
        hidden = self.third(torch.tanh(self.first(sounds)))
        scores = functional.log_softmax(hidden, -1).transpose(0, 1)
        return self.loss(scores, targets, (9, 9, 9, 9), (2, 2, 2, 2))


def test_lengths_that_fix_the_number_of_samples_are_refused_with_the_line():
    model = FixedLengths().double()
    with pytest.raises(CaptureFailed, match="does not run on 3 samples") as caught:
        capture_model(model, _sounds())
    line = FixedLengths.forward.__code__.co_firstlineno + 3
    assert f"{__file__}:{line} `" in str(caught.value)
