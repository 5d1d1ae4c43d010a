"""Backend "padded" on GPUs: nodes are pretended, and NCCL carries regions between them as it likes.

python -m pytest -m '' -s tests/kernels/test_padded_on_gpus.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import WHY_NO_HOPPER
from tests.kernels.test_network_on_gpus import SIZES, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,  # ranks that share a GPU wait for each other
    pytest.mark.skipif(WHY_NO_HOPPER is not None, reason=str(WHY_NO_HOPPER)),
    SIZES,
]


def test_a_communicator(sizes: tuple[int, int], tmp_path: Path) -> None:
    """Calls of a program, whole and in halves, eager and in a graph, against the reference. It prints mean times."""
    for rank, report in enumerate(run("padded", sizes, None, None, tmp_path)):
        for what, value in report.items():
            print(f"\nrank {rank} of {sizes[0]}, nodes of {sizes[1]}, {what} {value:.1f}", end="")
            assert value > 0
