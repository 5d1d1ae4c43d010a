"""Zeros behind values, where kernels need other widths than callers have."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pad(tensor: torch.Tensor, shape: Sequence[int], parts: int = 1) -> torch.Tensor:
    """Put zeros behind the values of each dimension, and behind each of the parts of dimension 1.

    Args:
        tensor: of two dimensions or more, and any strides.
        shape: of the result; no size is below the tensor's.
        parts: of dimension 1, such as gates and ups. They are of one size.

    Returns:
        A new tensor, or the one given if it has that shape.
    """
    if tensor.shape == tuple(shape):
        return tensor
    values = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # torch copies parts of no FP8
    apart = values.unflatten(1, (parts, -1))
    padded = values.new_zeros(shape).unflatten(1, (parts, -1))
    padded[tuple(map(slice, apart.shape))] = apart
    return padded.flatten(1, 2).view(tensor.dtype)
