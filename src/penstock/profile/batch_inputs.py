"""Removes tensors that need not be sent, because every stage can compute them from the batch."""

from dataclasses import replace

from penstock.profile.model_profile import ModelProfile

__all__ = ["without_batch_inputs"]


def without_batch_inputs(profile: ModelProfile) -> ModelProfile:
    """The profile without the edges of layers that depend only on the batch.

    Such a layer is an input; or it has no parameters and no backward, and reads only such layers:
    token ids, attention masks, position codes. Every stage has the batch, so it computes them
    itself in very little time, and no gradient flows back. Published planners leave out input nodes
    for the same reason (DAPPLE's planner, PipeDream's optimizer).
    """
    producers: dict[int, list[int]] = {}
    for edge in profile.edges:
        producers.setdefault(edge.consumer, []).append(edge.producer)
    trained = {layer for shared in profile.shared for layer in shared.layers}
    from_batch: list[bool] = []
    for index, layer in enumerate(profile.layers):
        backward = layer.backward_s
        untrained = not (
            layer.parameter_bytes or index in trained or backward.fixed or backward.per_sample
        )
        from_batch.append(untrained and all(from_batch[p] for p in producers.get(index, ())))
    kept = tuple(edge for edge in profile.edges if not from_batch[edge.producer])
    return replace(profile, edges=kept)
