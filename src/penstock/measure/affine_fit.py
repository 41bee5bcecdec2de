"""Fit affine costs to measurements at several batch sizes."""

from collections.abc import Sequence

from penstock.profile.model_profile import Affine


def fit_affine(samples: Sequence[int], costs: Sequence[float]) -> Affine:
    """The non-negative ``fixed + per_sample * b`` with the least sum of squared relative errors.

        minimise  sum_k ((fixed + per_sample * b_k - t_k) / t_k)^2,   fixed, per_sample >= 0

    Errors are relative because a slice of one sample matters as much as a whole micro-batch. With
    one batch size the cost is proportional to it. Costs of zero give zero.

    >>> fit_affine((1, 2, 4), (3.0, 5.0, 9.0))
    Affine(fixed=1.0, per_sample=2.0)
    >>> fit_affine((1, 4), (1.0, 8.0))
    Affine(fixed=0.0, per_sample=1.2)
    """
    points = [(b, t) for b, t in zip(samples, costs, strict=True) if t > 0]
    if not points:
        return Affine()
    # Normal equations of the rows (1 / t, b / t) with right-hand side 1.
    ones = sum(1 / t**2 for _, t in points)
    cross = sum(b / t**2 for b, t in points)
    squares = sum((b / t) ** 2 for b, t in points)
    fixed_target = sum(1 / t for _, t in points)
    slope_target = sum(b / t for b, t in points)
    determinant = ones * squares - cross**2
    only_slope = Affine(0.0, slope_target / squares)
    if determinant <= 1e-12 * ones * squares:
        return only_slope
    fixed = (squares * fixed_target - cross * slope_target) / determinant
    per_sample = (ones * slope_target - cross * fixed_target) / determinant
    if fixed < 0:
        return only_slope
    if per_sample < 0:
        return Affine(fixed_target / ones, 0.0)
    return Affine(round_off(fixed), round_off(per_sample))


def fit_layers(samples: Sequence[int], seconds: Sequence[Sequence[float]]) -> list[Affine]:
    """Fit ``seconds[k][layer]``; with the largest ``samples[k]``, the layers add up to their sum.

    Fitted by themselves they would be short of it: a layer whose seconds rise faster than its
    samples, if only by noise, is fitted in proportion to them.

    >>> fit_layers((1, 4), [[1.0, 2.0], [8.0, 2.0]])
    [Affine(fixed=0.0, per_sample=1.76470588235), Affine(fixed=2.94117647059, per_sample=0.0)]
    """
    costs = [fit_affine(samples, layer) for layer in zip(*seconds, strict=True)]
    most, measured_s = max(zip(samples, map(sum, seconds), strict=True))
    fitted_s = sum(cost.at(most) for cost in costs)
    factor = measured_s / fitted_s if fitted_s else 0.0
    return [Affine(*map(round_off, (c.fixed * factor, c.per_sample * factor))) for c in costs]


def round_off(value: float) -> float:
    """``value`` rounded to twelve significant digits, more than any clock can resolve."""
    return float(f"{value:.12g}")


def whole_bytes(size: Affine) -> Affine:
    """``size`` rounded to whole bytes: a fit to exact counts differs from them by rounding only."""
    return Affine(float(round(size.fixed)), float(round(size.per_sample)))
