"""The demo's training text: the source files of Python's standard library, which every machine with Python has."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenloom.errors import TokenloomError

MAX_BYTES = 4_000_000
MIN_BYTES = 100_000
"""With less text, a model would learn it by heart."""


def read_standard_library() -> tuple[bytes, str]:
    """The text, and a description of its source: files of the top folder, by name, up to MAX_BYTES.

    Raises:
        TokenloomError: this Python comes without its sources.
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
        text: at least ``context`` bytes.
        sequences: pieces in the batch of one step, over all ranks.
        context: bytes that the model sees; each piece has one more, its last target.
        seed: seed of the places where the pieces start.
    """

    def __init__(self, text: bytes, sequences: int, context: int, seed: int) -> None:
        self._text = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
        self._sequences, self._context = sequences, context
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def next(self, rank: int, num_ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of this rank's share of the next batch: int64 [sequences here, context] on ``device``.

        Every rank draws the whole batch and keeps every W-th piece, so shares may differ by one.
        """
        whole: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
        last = len(self._text) - self._context
        starts = torch.randint(last, (self._sequences,), generator=self._generator, **whole)
        places = starts[rank::num_ranks, None] + torch.arange(self._context + 1, **whole)
        pieces = self._text[places].to(device, torch.int64)
        return pieces[:, :-1], pieces[:, 1:]
