"""The exact split of equal layers for thousands of pipelines at once, in arrays. One at a time: `split.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_ROUNDS = 44  # halvings: relative 1e-13


def split_many(
    num_layers: int, unit_s: Floats, start_s: Floats, caps: Floats
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return layers per stage of every pipeline, at least one each, that minimise its slowest stage; and which fit.

    A row per pipeline and a column per stage; unused places have unit_s = inf. `start_s` is other work of a stage,
    `caps` is how many layers its memory holds. Rows that do not fit hold nothing of use.
    """
    import numpy as np

    used = np.isfinite(unit_s)
    unit = np.where(used, unit_s, 1.0)
    caps = np.where(used, np.minimum(caps, num_layers), 0.0)
    fits = ((caps >= 1) | ~used).all(axis=1) & (caps.sum(axis=1) >= num_layers)
    fits &= used.sum(axis=1) <= num_layers
    low = np.where(used, start_s + unit, 0.0).max(axis=1)
    high = np.where(used, start_s + unit * num_layers, 0.0).max(axis=1)
    low = low * (1 - 1e-9)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        enough = _held(middle, unit, start_s, caps).sum(axis=1) >= num_layers
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle)
    layers = _held(high, unit, start_s, caps)
    layers = np.where(used, np.maximum(layers, 1.0), 0.0)
    return _trimmed(num_layers, layers, unit, start_s, fits), fits


def _held(level_s: Floats, unit: Floats, start_s: Floats, caps: Floats) -> Floats:
    """Return how many layers each stage does within its pipeline's level."""
    import numpy as np

    whole = np.floor((level_s[:, None] - start_s) / unit + 1e-9)
    held: Floats = np.minimum(caps, np.maximum(whole, 0.0))
    return held


def _trimmed(
    num_layers: int, layers: Floats, unit: Floats, start_s: Floats, fits: NDArray[np.bool_]
) -> Floats:
    """Take surplus layers from the slowest stages that have more than one."""
    import numpy as np

    while True:
        surplus = np.flatnonzero((layers.sum(axis=1) > num_layers) & fits)
        if not len(surplus):
            return layers
        part = layers[surplus]
        loads = np.where(part > 1, start_s[surplus] + part * unit[surplus], -1.0)
        slowest = loads.argmax(axis=1)
        layers[surplus, slowest] -= 1
