"""Kernels between nodes on GPUs: NCCL's GIN carries puts and signals, over a card of host memory.

Nodes are pretended, by NCCL's variables. With TOKENLOOM_TEST_RANKS=4 ranks share GPUs where there are fewer: each is a
host of its own to NCCL then, and the kernels of a node reach each other's memory as always. That shows bits and
protocols, and no times. One command runs all of it, about a minute for each group of ranks::

    python -m pytest -m '' -s tests/kernels/test_network_on_gpus.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NUM_GPUS, WHY_NO_HOPPER
from tests.kernels.gpu_nodes import LIMIT_S, Options, specs_for
from tests.support import gin_loopback
from tests.support.gin_loopback import Loopback
from tokenloom.backends.nodes.nccl import loaded_library
from tokenloom.errors import BackendUnavailable
from tokenloom.jit import cache
from tokenloom.jit.compiler import NO_PRELUDE, Resources
from tokenloom.jit.nccl_headers import Headers, find_headers
from tokenloom.jit.nccl_layout import read_layout

ROOT = Path(__file__).parents[2]
GRACE_S = 10.0
"""Processes end by themselves; what has not by then is ended."""
LAST_LINES = 40


def ranks(num_ranks: int, ranks_per_node: int) -> Any:
    name = f"{num_ranks // ranks_per_node}x{ranks_per_node}"
    return pytest.param((num_ranks, ranks_per_node), id=name, marks=pytest.mark.gpu(num_ranks, may_share=True))


SIZES = pytest.mark.parametrize("sizes", [ranks(2, 1), ranks(4, 2), ranks(4, 1)])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NO_HOPPER is not None, reason=str(WHY_NO_HOPPER)),
    pytest.mark.skipif(gin_loopback.WHY_NOT is not None, reason=str(gin_loopback.WHY_NOT)),
    SIZES,
]
alone = pytest.mark.alone  # ranks that share a GPU wait for each other


@pytest.fixture(scope="module")
def headers() -> Headers:
    try:
        found = find_headers(loaded_library())
        read_layout(found)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return found


@pytest.fixture(scope="module")
def loopback(headers: Headers, tmp_path_factory: pytest.TempPathFactory) -> Loopback:
    return gin_loopback.build(tmp_path_factory.mktemp("gin_loopback"), headers.runtime)


def compile_kernels(scenario: str, sizes: tuple[int, int], headers: Headers | None) -> list[cache.Entry]:
    prelude = NO_PRELUDE if headers is None else headers.prelude()
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda spec: cache.get(spec.behind(prelude)), specs_for(*sizes, scenario)))


def run(
    scenario: str,
    sizes: tuple[int, int],
    headers: Headers | None,
    loopback: Loopback | None,
    folder: Path,
    delay_us: int = 0,
) -> list[Any]:
    """The scenario in a process for each rank: what they report, by rank. Without a card NCCL finds its own way."""
    num_ranks, ranks_per_node = sizes
    compile_kernels(scenario, sizes, headers)  # once, and not by each rank within its limit
    inherited = {name: value for name, value in os.environ.items() if name != "NCCL_NET"}
    inherited |= {"CUDA_MODULE_LOADING": "EAGER", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    logs = [folder / f"log{rank}" for rank in range(num_ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            options = json.dumps(asdict(Options(scenario, rank, num_ranks, ranks_per_node, str(folder))))
            command = [sys.executable, "-m", "tests.kernels.gpu_nodes", options]
            variables = inherited if loopback is None else inherited | loopback.environment(delay_us)
            # NCCL refuses two ranks of one host on one GPU.
            host = rank if num_ranks > NUM_GPUS else rank // ranks_per_node
            variables |= {"NCCL_HOSTID": f"host-{host}", "NCCL_SOCKET_IFNAME": "lo"}
            with log.open("wb") as out:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=out, stderr=out))
        until = time.monotonic() + LIMIT_S + GRACE_S
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            failed = any(process.poll() not in (None, 0) for process in processes)
            until = min(until, time.monotonic() + GRACE_S) if failed else until
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(GRACE_S)
    codes = [process.returncode for process in processes]
    ends = ["\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]) for log in logs]
    said = "\n".join(f"--- rank {rank} ended with {codes[rank]}\n{end}" for rank, end in enumerate(ends))
    assert codes == [0] * num_ranks, said
    return [json.loads((folder / f"result{rank}").read_text()) for rank in range(num_ranks)]


def test_kernels_compile(sizes: tuple[int, int], headers: Headers) -> None:
    """With the headers of this machine's NCCL: no spill, no stack. Other tests may run meanwhile."""
    for entry in compile_kernels("bits", sizes, headers):
        needs = Resources.from_log(entry.log)
        assert (needs.stack_bytes, needs.spill_bytes) == (0, 0), entry.log


@alone
def test_all_calls(sizes: tuple[int, int], headers: Headers, loopback: Loopback, tmp_path: Path) -> None:
    """Both layouts, with and without FP8, uneven and no tokens; twenty calls with no host between them; a graph that
    is replayed with other routings. All results have the reference's bits. It prints medians of times.
    """
    for rank, report in enumerate(run("bits", sizes, headers, loopback, tmp_path)):
        for what, value in report.items():
            print(f"\nrank {rank} of {sizes[0]}, nodes of {sizes[1]}, {what} {value:.1f}", end="")
            assert value > 0


@alone
@pytest.mark.parametrize("delay_us", [0, 500], ids=["in order", "delayed"])
def test_a_communicator(
    sizes: tuple[int, int], delay_us: int, headers: Headers, loopback: Loopback, tmp_path: Path
) -> None:
    """Calls of a program, eager and in a graph, in both layouts, against the reference. It prints mean times.

    A card that holds connections back brings signals of one context before those of another that were raised earlier.
    """
    for rank, report in enumerate(run("communicator", sizes, headers, loopback, tmp_path, delay_us)):
        for what, value in report.items():
            print(f"\nrank {rank} of {sizes[0]}, nodes of {sizes[1]}, {what} {value:.1f}", end="")
            assert value > 0


@alone
@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_a_rank_that_makes_no_call(
    sizes: tuple[int, int], kind: str, headers: Headers, loopback: Loopback, tmp_path: Path
) -> None:
    """All others report a peer within five seconds, and the reports lead to it. Memory stays until the abort."""
    reports = run(kind, sizes, headers, loopback, tmp_path)
    assert [each["reports"] for each in reports] == [reports[0]["reports"]] * sizes[0]
