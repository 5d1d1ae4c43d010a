"""What arrives beside rows and scales: ids, weights and places of routes, in a receive buffer or in a copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class BesideRows:
    """What comes beside rows and scales: local_ids, weights and row_places [R, K], and row_tokens [R]. Views of them
    are made when they are read.

    Args:
        memory: int32, one dimension, all of it.
        parts: where each of them begins there, by its name.
        num_rows, top_k: R and K.

    Attributes:
        num_rows: as given.
        ids_address, places_address, tokens_address, weights_address: of each of them, for kernels.
    """

    scales: torch.Tensor

    def __init__(self, memory: torch.Tensor, parts: Mapping[str, int], num_rows: int, top_k: int) -> None:
        self._memory, self._parts, self.num_rows, self._top_k = memory, parts, num_rows, top_k
        address = memory.data_ptr()
        self.ids_address = address + 4 * parts["local_ids"]
        self.places_address = address + 4 * parts["row_places"]
        self.tokens_address = address + 4 * parts["row_tokens"]
        self.weights_address = address + 4 * parts["weights"]

    def part(self, name: str, num_rows: int | None) -> torch.Tensor:
        """One of them, of the first so many rows; None: of all."""
        if num_rows is None:
            num_rows = self.num_rows
        memory, begin, top_k = self._memory, self._parts[name], self._top_k
        if name == "row_tokens":
            return memory[begin : begin + num_rows]
        if name == "weights":
            memory = memory.view(torch.float32)
        return memory.as_strided((num_rows, top_k), (top_k, 1), memory.storage_offset() + begin)

    def copied(self) -> OwnRows:
        """The same in memory of its own. All is copied at once, which costs less than part by part."""
        return OwnRows(self._memory.clone(), self._parts, self.num_rows, self._top_k)


class OwnRows(BesideRows):
    """A copy of what a receive buffer has beside its rows and scales: the handle has its own of these."""

    holds_tensors = True
