"""Records: what is written down as JSON and read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float


def require_shapes(arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ValueError` with a sentence for the first array that has another shape."""
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} of shape {list(arrays[name].shape)}, where {list(shape)} is needed")


def plain_numbers(values: Float[np.ndarray, "..."]) -> Any:
    """Nested lists of numbers, with None for nan."""
    numbers = values.astype(object)
    numbers[np.isnan(values)] = None
    return numbers.tolist()
