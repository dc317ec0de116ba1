"""Robust non-linear least squares: Levenberg-Marquardt on log residuals, outliers weighted down."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.shape import FloatArray

STEP = 1e-4
"""Step of the numerical derivative; the parameters are logarithms."""
MAX_ITERATIONS = 60


def least_squares(
    residuals: Callable[[FloatArray], FloatArray],
    start: FloatArray,
    low: FloatArray,
    high: FloatArray,
    scale: float,
    counts: FloatArray | float = 1.0,
    tolerance: float = 1e-7,
) -> FloatArray:
    """The x between `low` and `high` with the least Σ counts · soft-L1(residual / scale): linear above `scale`.

    soft-L1(z) = 2·(√(1 + z²) − 1), so that a few shapes for which a library chose badly do not bend the physics. Ends
    where an iteration lowers the sum by less than its share `tolerance`.
    """
    x, damping = np.clip(start, low, high), 1e-3
    current = residuals(x)
    for _ in range(MAX_ITERATIONS):
        weights = np.sqrt(counts) * (1 + (current / scale) ** 2) ** -0.25
        jacobian = _jacobian(residuals, x, current, high) * weights[:, None]
        gradient, hessian = jacobian.T @ (weights * current), jacobian.T @ jacobian
        before = soft_l1(current, scale, counts)
        for _ in range(8):
            trial = np.clip(
                x - np.linalg.solve(hessian + damping * np.diag(np.diag(hessian) + 1e-9), gradient), low, high
            )
            moved = residuals(trial)
            if soft_l1(moved, scale, counts) < before:
                damping = max(damping / 3, 1e-9)
                break
            damping *= 4
        else:
            break
        x, current = trial, moved
        if before - soft_l1(current, scale, counts) < tolerance * before:
            break
    return x


def soft_l1(residual: FloatArray, scale: float, counts: FloatArray | float = 1.0) -> float:
    """Half of Σ counts · soft-L1(residual / scale)."""
    return float(np.sum(counts * (np.sqrt(1 + (residual / scale) ** 2) - 1)))


def _jacobian(
    residuals: Callable[[FloatArray], FloatArray], x: FloatArray, at: FloatArray, high: FloatArray
) -> FloatArray:
    columns = []
    for i in range(len(x)):
        step = -STEP if x[i] + STEP > high[i] else STEP
        moved = x.copy()
        moved[i] += step
        columns.append((residuals(moved) - at) / step)
    return np.stack(columns, axis=1)
