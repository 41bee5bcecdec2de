"""The cost of an optimizer step that may have to be undone, because some rank may still fail.

See `penstock.runtime.steps.overlapped`. All that the step changes is copied before it.
"""

from dataclasses import replace

from penstock.profile.model_profile import ModelProfile

__all__ = ["with_undoable_step"]


def with_undoable_step(
    profile: ModelProfile, optimizer_bytes_per_parameter_byte: float
) -> tuple[ModelProfile, float]:
    """The profile and the optimizer's bytes of each parameter byte where steps can be undone.

    Parameters and state, ``1 + s`` bytes, are kept twice. Times are in proportion to the
    bytes touched, as in a prediction (`penstock.simulate.stage_work`). A copy reads and writes
    ``2 (1 + s)``. A step clears gradients, takes their norm and scales them (4), reads
    gradients, parameters and state and writes the last two (``1 + 2 (1 + s)``).

    >>> from penstock.profile.model_profile import Affine, LayerCost
    >>> layer = LayerCost("layer", Affine(), Affine(), Affine())
    >>> profile = ModelProfile("m", (layer,), step_s_per_byte=11.0)
    >>> profile, state = with_undoable_step(profile, 2.0)
    >>> profile.step_s_per_byte, state
    (17.0, 5.0)
    """
    touched = 2 * (1 + optimizer_bytes_per_parameter_byte)
    step_s = profile.step_s_per_byte * (1 + touched / (5 + touched))
    kept = 1 + 2 * optimizer_bytes_per_parameter_byte
    return replace(profile, step_s_per_byte=step_s), kept
