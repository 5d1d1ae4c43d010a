"""The demo's training text: the source files of Python's standard library, which every machine with Python has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch

from tokenloom.errors import TokenloomError

MAX_BYTES = 4_000_000
MIN_BYTES = 100_000
"""With less, a model would learn the text by heart."""


def read_standard_library() -> tuple[bytes, str]:
    """The text, and a description of where it comes from.

    Files of the top folder, by name, until there are MAX_BYTES.

    Raises:
        TokenloomError: this Python came without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text, num_files = bytearray(), 0
    for file in sorted(folder.glob("*.py")):
        if len(text) >= MAX_BYTES:
            break
        text += file.read_bytes()
        num_files += 1
    if len(text) < MIN_BYTES:
        raise TokenloomError(
            f"the demo trains on Python's own source files; expected at least {MIN_BYTES} bytes of them in {folder}, "
            f"found {len(text)}; use a Python that comes with its standard library as .py files"
        )
    text = text[:MAX_BYTES]
    return bytes(text), f"{len(text) / 1e6:.1f} MB from {num_files} source files in {folder}"


class Batches:
    """Random pieces of a text, the same for every number of ranks.

    Args:
        text: bytes.
        sequences: pieces in the batch of one step, over all ranks.
        context: bytes that the model sees; each piece has one more, its last target.
        seed: of the places where the pieces start.
    """

    def __init__(self, text: bytes, sequences: int, context: int, seed: int) -> None:
        self._text = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
        self._sequences, self._context = sequences, context
        self._generator = torch.Generator().manual_seed(seed)

    def next(self, rank: int, num_ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of the next batch: inputs and targets, int64 [sequences here, context] on ``device``.

        Every rank draws the whole batch and keeps every W-th piece, so shares may differ by one.
        """
        starts = torch.randint(len(self._text) - self._context, (self._sequences,), generator=self._generator)
        places = starts[rank::num_ranks, None] + torch.arange(self._context + 1)
        pieces = self._text[places].to(device, torch.int64)
        return pieces[:, :-1], pieces[:, 1:]
