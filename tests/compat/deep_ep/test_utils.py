"""What upstream's tests import from ``deep_ep.utils``."""

from __future__ import annotations

import socket
import subprocess
import sys
from os import environ

import pytest
import torch

from tokenloom.compat.deep_ep.utils import envs, math, testing
from tokenloom.runtime.processes import RankPool

SCRIPT = """
import sys
import torch, torch.distributed as dist
from tokenloom.compat.deep_ep.utils import envs
rank, num_ranks, group = envs.init_dist(int(sys.argv[1]), 2, seed=7)
assert (rank, num_ranks) == (int(sys.argv[1]), 2)
assert dist.get_world_size(group) == 2
assert torch.get_default_dtype() == torch.bfloat16
assert (envs.get_global_seed(), envs.get_local_seed()) == (7, 7 + rank)
envs.dist_print(f"rank {rank}", once_in_node=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_init_dist() -> None:
    """Two processes meet at the address that the environment names, and rank 0 alone prints."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    variables = {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen([*command, rank], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    said = [each.communicate(timeout=100) for each in started]
    assert [each.returncode for each in started] == [0, 0], said
    assert [out for out, _ in said] == ["rank 0\n", ""]


def test_arithmetic() -> None:
    assert (math.ceil_div(7, 3), math.align(7, 4), math.safe_div(3, 0), math.safe_div(3, 2)) == (3, 8, 0, 1.5)
    x = torch.randn(4, 8)
    assert math.calc_diff(x, x) == pytest.approx(0, abs=1e-12)
    assert math.calc_diff(x, x + 1) > 0.01
    assert math.count_bytes(x, None, (x, [x])) == 3 * 4 * 4 * 8


def test_fp8() -> None:
    x = torch.randn(3, 512)
    q, scales = math.per_token_cast_to_fp8(x)
    assert (q.dtype, scales.shape) == (torch.float8_e4m3fn, (3, 4))
    back = math.per_token_cast_back(q, scales)
    assert back.dtype == torch.bfloat16
    assert math.calc_diff(back, x) < 1e-3
    words = torch.tensor([[127 + 1 | 127 << 8 | 126 << 16 | 127 << 24]] * 3, dtype=torch.int32)
    packed = math.per_token_cast_back(q, words)
    factors = torch.tensor([2.0, 1.0, 0.5, 1.0]).repeat_interleave(128)
    assert torch.equal(packed, (q.float() * factors).bfloat16())


def test_ids() -> None:
    ids = torch.tensor([[3, 1, 3, -1], [-1, -1, -1, -1], [2, 2, 0, 0]])
    math.inplace_unique(ids, 4)
    assert ids.tolist() == [[3, 1, -1, -1], [-1] * 4, [0, 2, -1, -1]]
    scores = torch.arange(8.0).view(1, 8) + 1
    grouped = math.create_grouped_scores(scores, torch.tensor([[1]]), 4)
    assert grouped.tolist() == [[0, 0, 3, 4, 0, 0, 0, 0]]


def test_hashes() -> None:
    x, y = torch.arange(4), torch.arange(4) + 1
    assert math.hash_tensor(x) == math.hash_tensor(x.clone()) != math.hash_tensor(y)
    assert math.hash_tensors(x, y) != math.hash_tensors(x, x)


def test_benches() -> None:
    calls: list[int] = []
    mean, least, most = testing.bench(lambda: calls.append(1), num_warmups=1, num_tests=3, post_fn=lambda: None)
    assert len(calls) == 4
    assert 0 <= least <= mean <= most
    x = torch.ones(64, 64)
    seconds = testing.bench_kineto(lambda: x @ x, "aten::mm", num_tests=2)
    assert isinstance(seconds, float)
    assert seconds > 0
    found = testing.bench_kineto(lambda: x @ x, ("aten::mm", "nothing of this name"), num_tests=2)
    assert isinstance(found, tuple)
    assert found[0] > 0 == found[1]


def test_seeds() -> None:
    state = torch.get_rng_state()
    envs.init_seed(3)
    assert envs.get_global_seed() == envs.get_local_seed() == 3
    torch.set_rng_state(state)


def test_a_pool_is_left_alone() -> None:
    """``envs`` changes defaults of its process, which the tests around must not see."""
    assert torch.get_default_dtype() == torch.float32
    assert RankPool is not None
