"""Reading of a measured routing: the topk_ids of all ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tokenloom.errors import InvalidArgument

SUFFIXES = (".npy", ".pt")
_EXPECTED = "integers [W, T, K], or in a .pt file a list of W tensors [T, K], -1 for unused places"


def read_routing(file: Path, num_experts: int) -> list[np.ndarray]:
    """Read the experts of every token.

    Args:
        file: .npy with integers [W, T, K]; or .pt with such a tensor, or with a list of W tensors [T, K], whose T may
            differ.
        num_experts: E. Ids are -1 (unused) or 0..E-1.

    Returns:
        int64 [T, K] of each of the W ranks.

    Raises:
        InvalidArgument: the file cannot be read, or holds something else.
    """
    by_rank = _load(file)
    shapes = sorted({each.shape for each in by_rank})
    if not by_rank or any(len(shape) != 2 or shape[1:] != shapes[0][1:] for shape in shapes) or not shapes[0][1]:
        raise InvalidArgument(f"{file} holds {len(by_rank)} times {', '.join(map(str, shapes))}, expected {_EXPECTED}")
    for rank, ids in enumerate(by_rank):
        if ids.dtype.kind not in "iu":
            raise InvalidArgument(f"{file} holds {ids.dtype}, expected {_EXPECTED}")
        if bad := ids[(ids < -1) | (ids >= num_experts)].tolist():
            raise InvalidArgument(
                f"{file} has expert {bad[0]} on rank {rank}, expected -1 (unused) or 0..{num_experts - 1}; "
                "give the layer's --num-experts"
            )
    return [ids.astype(np.int64) for ids in by_rank]


def _load(file: Path) -> list[np.ndarray]:
    try:
        if file.suffix == ".npy":
            return list(np.atleast_1d(np.load(file, allow_pickle=False)))
        if file.suffix == ".pt":
            import torch  # takes seconds, which .npy files need not wait for

            found = torch.load(file, map_location="cpu", weights_only=True)
            tensors = list(found) if isinstance(found, list | tuple | torch.Tensor) else [found]
            return [np.asarray(each) for each in tensors]
    except Exception as error:  # torch and numpy raise a dozen kinds for a damaged file
        raise InvalidArgument(f"{file} cannot be read ({error}); expected {_EXPECTED}") from error
    raise InvalidArgument(f"{file} ends in {file.suffix!r}, expected one of {', '.join(SUFFIXES)}")
