"""The card of host memory is right: what its self-test shows, and that it shows it.

Whatever GIN's tests find is worth no more than the card that they run on.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import NUM_GPUS
from tests.support import gin_loopback
from tests.support.gin_loopback import Loopback
from tests.support.nccl_wheels import cuda_headers

EXPERIMENTAL = True

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(gin_loopback.WHY_NOT is not None, reason=str(gin_loopback.WHY_NOT)),
]


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Loopback:
    return gin_loopback.build(tmp_path_factory.mktemp("gin_loopback"), cuda_headers())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_without_a_gpu(loopback: Loopback, num_ranks: int) -> None:
    """Puts, signals, gets, windows that come and go, full rings, the two-sided net: every byte is checked."""
    done = loopback.run_selftest(num_ranks, gpus=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout


@pytest.mark.parametrize("seed", [1, 2])
def test_delays_reorder_connections_only(loopback: Loopback, seed: int) -> None:
    """A signal overtakes the payload of another connection, as on a real network, and never that of its own.

    The self-test fails unless each rank has seen the first.
    """
    done = loopback.run_selftest(4, gpus=False, delay_us=300, seed=seed)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("serve.h", "size[n_copies++] = m->size;", "size[n_copies++] = m->size / 2;", "wrong data"),
        ("serve.h", "if (now() < c->release) return 1;", "", "early > 0"),
    ],
)
def test_the_self_test_fails_on_a_broken_card(tmp_path: Path, file: str, old: str, new: str, words: str) -> None:
    """A card that loses bytes, and one whose connections keep an order among themselves."""
    sources = tmp_path / "sources"
    shutil.copytree(gin_loopback.HERE, sources)
    text = (sources / file).read_text()
    assert text.count(old) == 1
    (sources / file).write_text(text.replace(old, new))
    broken = gin_loopback.build(tmp_path, cuda_headers(), sources)
    done = broken.run_selftest(2, gpus=False, delay_us=300)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.gpu(2)
def test_on_gpus(loopback: Loopback) -> None:
    """The same with the driver's copies and real memory of GPUs, without NCCL."""
    done = loopback.run_selftest(min(NUM_GPUS, 4), gpus=True)
    assert done.returncode == 0, done.stdout + done.stderr
