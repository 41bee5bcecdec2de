"""Samples that own several rows of a tensor: codes of a sound, patches of a picture."""

import pytest
import torch
from plain_training import assert_pipeline_equals_plain, in_two_stages
from reference.crossing import crossing
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.measure.layer_times import measure_profile

BOOKS, WORDS, PATCHES = 3, 5, 4


class Codes(nn.Module):
    """Every sample has a row of words in each of three books; their vectors are added."""

    def __init__(self):
        super().__init__()
        self.books = nn.ModuleList(nn.Embedding(7, 8) for _ in range(BOOKS))
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 7)

    def forward(self, codes, labels):
        by_book = codes.view(-1, BOOKS, WORDS).unbind(1)
        hidden = sum(book(words) for book, words in zip(self.books, by_book, strict=True))
        scores = self.last(torch.tanh(self.middle(hidden)))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Patches(nn.Module):
    """The patches of all pictures in one list; the vector of a picture is their mean."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(6, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, patches, kinds):
        seen = self.middle(torch.tanh(self.patch(patches)))
        return self.last(torch.tanh(seen).view(kinds.shape[0], -1, 8).mean(1))


def codes(samples):
    labels = torch.randint(7, (samples, WORDS))
    labels[0, 1:] = -100
    return torch.randint(7, (samples * BOOKS, WORDS)), labels


def pictures(samples):
    patches = torch.randn(samples * PATCHES, 6, dtype=torch.float64)
    kinds = torch.arange(samples) % 3
    return patches, kinds, kinds


CASES = {"codes": (Codes, codes, None), "patches": (Patches, pictures, functional.cross_entropy)}


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_rows_of_a_sample_are_cut_with_it(case, micro_batches):
    model, batch, loss = CASES[case]
    graph = assert_pipeline_equals_plain(
        model().double(), batch(4), loss=loss, micro_batches=micro_batches
    )
    assert graph.batch_size == 4
    assert graph.mixing == ""


def test_slices_of_unequal_numbers_of_samples_and_other_batches_are_right():
    model = Patches().double()
    graph = capture_model(model, pictures(4), loss=functional.cross_entropy)
    pipeline = in_two_stages(graph, pictures(4), rows=3)
    for samples in (6, 5, 1):
        patches, kinds, targets = batch = pictures(samples)
        expected = functional.cross_entropy(model(patches, kinds), targets)
        assert pipeline.evaluate(batch).loss == pytest.approx(float(expected.detach()), rel=1e-12)


def test_a_model_of_such_batches_is_profiled():
    graph = capture_model(Patches().double(), pictures(4), loss=functional.cross_entropy)
    profile = measure_profile(graph, pictures(4), repeats=1)
    assert [layer.name for layer in profile.layers] == ["patch", "middle", "last", "loss"]
    # Four patches of eight numbers of eight bytes for each sample.
    assert [edge.bytes.at(3) for edge in crossing(profile)[1]] == [3 * PATCHES * 8 * 8]


class Scores(nn.Module):
    """One score for each text."""

    def __init__(self):
        super().__init__()
        self.words, self.middle, self.last = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, texts):
        return self.last(torch.tanh(self.middle(self.words(texts).mean(1))))[:, 0]


def preferred(scores, weights):
    """Texts are in pairs, of which the first is the better one."""
    gaps = scores[0::2] - scores[1::2]
    return -(functional.logsigmoid(gaps) * weights[0::2]).mean()


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_pairs_that_the_user_declares_are_not_cut_apart(micro_batches):
    batch = torch.randint(9, (8, WORDS)), torch.rand(8, dtype=torch.float64)
    options = {"loss": preferred, "rows": {0: 2, 1: 2}, "micro_batches": micro_batches}
    graph = assert_pipeline_equals_plain(Scores().double(), batch, tolerance=1e-12, **options)
    assert graph.batch_size == 4


def test_one_sample_is_enough_if_its_rows_are_declared():
    model = Patches().double()
    batch = pictures(1)
    graph = capture_model(model, batch, loss=functional.cross_entropy, rows={0: PATCHES})
    whole = pictures(4)
    expected = functional.cross_entropy(model(*whole[:2]), whole[2])
    pipeline = in_two_stages(graph, whole, rows=1, micro_batches=4)
    assert pipeline.evaluate(whole).loss == pytest.approx(float(expected.detach()), rel=1e-12)
