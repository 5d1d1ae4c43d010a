"""Other rows by the routes of earlier dispatches, where calls are usual."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenloom.backends.base import OwnOutputs, Rows
from tokenloom.backends.nvlink.buffers import version_of
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.prepared import DirectDispatch

Copier = Callable[[NvlinkHandle, OwnOutputs], Callable[[torch.Tensor], torch.Tensor]]


class UsualAgain:
    """Other rows of one kind, by the routes of any dispatch of one kind.

    Args:
        prepared: sends them.
        copier: gives what makes rows of a dispatch their owner's. own: who that is.
    """

    def __init__(self, prepared: DirectDispatch, copier: Copier, own: OwnOutputs) -> None:
        self._prepared, self._copier, self._own = prepared, copier, own

    @property
    def is_stale(self) -> bool:
        return self._prepared.is_old

    def fits(self, handle: NvlinkHandle) -> bool:
        """Whether other rows can go the way of this dispatch, and lie as its rows did."""
        prepared, launcher = self._prepared, self._prepared.launcher
        return (
            handle.num_places <= handle.capacity == prepared.capacity
            and not handle.by_token
            and handle.masked == launcher.masked
            and handle.number >= launcher.known_from
            and version_of(handle.given_ids) == handle.ids_version
        )

    def launch(
        self, handle: NvlinkHandle, x: torch.Tensor, scales: torch.Tensor | None, stream: int
    ) -> tuple[NvlinkHandle, torch.Tensor]:
        """Put the kernel on the current stream: what :meth:`finish` takes."""
        ids, num_tokens = handle.given_ids, handle.num_tokens
        return self._prepared.launch(x, scales, ids, None, num_tokens, None, stream)[:2]

    def finish(self, handle: NvlinkHandle, again: NvlinkHandle, rows: torch.Tensor) -> Rows:
        """Rows of the size that they have, and their scales if they have some.

        Args:
            handle: of the earlier dispatch.
        """
        copy, num_places = self._copier(again, self._own), handle.num_places
        scales = again.scales
        rows = copy(rows[:num_places])
        return rows if scales is None else (rows, copy(scales[:num_places]))
