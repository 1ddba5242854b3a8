"""Checks of the arguments of every credit function."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def vectors(**named: ArrayLike) -> list[np.ndarray]:
    """Each argument as a float64 vector. ValueError names an argument that is not a vector or has another length."""
    arrays = {name: np.asarray(x, dtype=np.float64) for name, x in named.items()}
    first = next(iter(arrays))
    for name, x in arrays.items():
        if x.ndim != 1:
            raise ValueError(f"{name} must be one vector, but has shape {x.shape}")
        if len(x) != len(arrays[first]):
            raise ValueError(f"{name} has {len(x)} entries, but {first} has {len(arrays[first])}")
    return list(arrays.values())


def mask_like(name: str, mask: ArrayLike, length: int) -> np.ndarray:
    """`mask` as a boolean vector of `length`."""
    m = np.asarray(mask)
    if m.shape != (length,):
        raise ValueError(f"{name} has shape {m.shape}, not ({length},)")
    return m.astype(bool)
