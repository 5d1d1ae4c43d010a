"""Who is missing is named over NCCL too, where hosts wait for the handshake of a call. Nodes are pretended.

python -m pytest -m '' -s tests/kernels/test_lost_rank_on_gpus.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import WHY_NO_HOPPER
from tests.kernels.gpu_lost_rank import AWAY_S
from tests.kernels.test_network_on_gpus import ranks, run

CLOSING_S = 8.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,  # ranks that share a GPU wait for each other
    pytest.mark.skipif(WHY_NO_HOPPER is not None, reason=str(WHY_NO_HOPPER)),
    pytest.mark.parametrize("sizes", [ranks(4, 2)]),  # the backend refuses nodes of one rank
]


@pytest.mark.parametrize("how", ["late", "gone"])
def test_a_rank_between_calls(sizes: tuple[int, int], how: str, tmp_path: Path) -> None:
    num_ranks, ranks_per_node = sizes
    *others, _ = run(how, sizes, None, None, tmp_path)
    for report in others:
        assert report.pop("after_s") < AWAY_S
        assert report.pop("closed_in_s") < CLOSING_S
        node = (num_ranks - 1) // ranks_per_node
        assert report == {"peers": [num_ranks - 1], "nodes": [node], "phase": "the handshake of dispatch"}
