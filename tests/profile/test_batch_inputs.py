"""Tensors made from the batch alone are not sent; all others are."""

from dataclasses import replace

from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    ModelProfile,
    SharedParameter,
    without_batch_inputs,
)


def layer(name: str, backward_s: float, parameter_bytes: int) -> LayerCost:
    half = Affine(0.0, backward_s / 2)
    return LayerCost(name, Affine(0.0, 1.0), half, half, parameter_bytes)


def edge(producer: int, consumer: int) -> Edge:
    return Edge(producer, consumer, f"tensor{producer}", Affine(0.0, 8.0), Affine(0.0, 8.0))


def test_masks_stay_and_activations_travel():
    layers = (
        layer("ids", 0, 0),
        layer("mask", 0, 0),
        layer("embedding", 0, 100),
        layer("dropout", 0, 0),
        layer("block", 2, 100),
        layer("activation", 2, 0),
        layer("block", 2, 100),
    )
    pairs = [(0, 1), (0, 2), (1, 4), (1, 6), (2, 3), (3, 4), (4, 5), (5, 6)]
    profile = ModelProfile("drawn", layers, tuple(edge(i, j) for i, j in pairs))
    kept = [(e.producer, e.consumer) for e in without_batch_inputs(profile).edges]
    assert kept == [(2, 3), (3, 4), (4, 5), (5, 6)]


def test_a_layer_of_tied_weights_is_trained():
    layers = (layer("embedding", 0, 0), layer("head", 2, 0))
    profile = ModelProfile("tied", layers, (edge(0, 1),))
    assert not without_batch_inputs(profile).edges
    tied = replace(profile, shared=(SharedParameter("weights", 10, (0, 1)),))
    assert without_batch_inputs(tied).edges == profile.edges
