"""Pools of rank processes that live for the whole run, and the fixture that runs a test on groups of their ranks."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import emulator
from tests.support.server import NewRanks
from tests.support.slow import left_out
from tests.support.stand_ins import StandIns
from tokenloom.kernels.common import MAX_RANKS
from tokenloom.runtime.processes import RankPool

CPU_RANKS = NETWORK_RANKS = 4
GROUP_SIZES = (1, 2, 4, 8)
COLLECTED = pytest.StashKey[set[str]]()
"""Ids of all tests of the collected files, also of those that the command line leaves out."""
TIMES = 1
"""How often, at least, each value of each parameter of a test occurs in CI."""
FORKED = ["torch.distributed", "pytest", "hypothesis", "tokenloom.runtime.processes"]
"""What ranks have imported when they start."""
FORKED_ON_CPUS = ["tests.conftest", "tests.support.cases", "torch.distributed.tensor"]
"""The same where there is no GPU, beside what tests with the marker ``imports`` name."""

torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
"""Also of processes that tests start. Tensors are small, and threads spin for cores that other processes have."""
os.environ.pop("COLUMNS", None)  # readline, which pytest imports, sets it for all of pytest's children
gc.freeze()  # in all ranks too: torch alone has so many objects that each gc.collect() of a test takes 0.1 s

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
GPU_RANKS = max(NUM_GPUS, int(os.environ.get("TOKENLOOM_TEST_RANKS", "0"))) if NUM_GPUS else 0
"""Most ranks of a group on GPUs. Where there are fewer GPUs they share them, which takes long and shows no races of
links, but runs every kernel between its peers."""
LIMIT_S = 120.0 if GPU_RANKS == NUM_GPUS else 360.0
"""A test that takes longer on its ranks hangs: it is killed and reported with the stacks of all ranks."""
WHY_NO_HOPPER = None if HOPPER else "no Hopper GPU on this machine" if NUM_GPUS else "no NVIDIA GPU on this machine"
"""Why tests of backend "nvlink" alone cannot run here; None if they can."""


@dataclass(frozen=True)
class Ranks:
    """A group of ranks to run functions on, see RankPool.run."""

    pool: RankPool
    num_ranks: int

    @property
    def device(self) -> str:
        return self.pool.device

    @property
    def shares_gpus(self) -> bool:
        """Whether ranks take turns on a GPU: each wait for a peer is some milliseconds."""
        return self.device == "cuda" and self.num_ranks > NUM_GPUS

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S, **kwargs: Any) -> list[Any]:
        """``function(context, *args, **kwargs)`` on every rank of the group; results by rank."""
        return self.pool.run(function, *args, ranks=self.num_ranks, limit_s=limit_s, **kwargs)


def _group_params() -> list[Any]:
    if emulator.ON:
        return [pytest.param(("emulated", n), id=f"emulated{n}") for n in GROUP_SIZES if n <= CPU_RANKS]
    cpu = [pytest.param(("cpu", n), id=f"cpu{n}") for n in GROUP_SIZES if n <= CPU_RANKS]
    if not NUM_GPUS:
        skip = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
        return [*cpu, pytest.param(("cuda", 1), id="cuda", marks=[pytest.mark.gpu, skip])]
    return cpu + [
        pytest.param(("cuda", n), id=f"cuda{n}", marks=pytest.mark.gpu) for n in GROUP_SIZES if n <= GPU_RANKS
    ]


@pytest.fixture(scope="session", autouse=True)
def forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks are forks of one process, which has imported what they need: that takes longer than most tests.

    ``tests/runtime/test_processes.py`` starts them as users do. A process that has asked for GPUs cannot be forked, so
    where there are some it has imported nothing that asks.
    """
    forked = FORKED
    if not NUM_GPUS:
        markers = (marker for item in request.session.items for marker in item.iter_markers("imports"))
        forked = [*FORKED, *FORKED_ON_CPUS, *sorted({name for marker in markers for name in marker.args})]
    multiprocessing.set_forkserver_preload(forked)
    real = torch.multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return real("forkserver" if method == "spawn" else method)

    with mock.patch.object(torch.multiprocessing, "get_context", get_context):
        yield


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[str], RankPool]]:
    """The pool of each device type, started when a test first asks for it."""
    made: dict[str, RankPool] = {}

    def pool(device: str) -> RankPool:
        if device not in made:
            made[device] = RankPool(CPU_RANKS if device == "cpu" else GPU_RANKS, device)
        return made[device]

    yield pool
    for each in made.values():
        each.close()


@pytest.fixture(scope="session", params=_group_params())
def ranks(request: pytest.FixtureRequest, pools: Callable[[str], RankPool]) -> Any:
    """Groups of 1, 2, 4 (and 8) ranks: processes over gloo, and GPUs over NCCL where there are some.

    Behind ``-p tests.support.emulator.plugin`` kernels run without a GPU instead.
    """
    device, num_ranks = request.param
    if device == "emulated":
        return emulator.ranks(num_ranks)
    return Ranks(pools(device), num_ranks)


@pytest.fixture(scope="session")
def several_ranks(ranks: Ranks) -> Ranks:
    """Groups of ``ranks`` that are two or more, of which one can be of another opinion."""
    if ranks.num_ranks == 1:
        pytest.skip("a rank alone has no others")
    return ranks


@pytest.fixture
def two(pools: Callable[[str], RankPool]) -> Ranks:
    """Two processes over gloo."""
    return Ranks(pools("cpu"), 2)


@pytest.fixture
def four(pools: Callable[[str], RankPool]) -> Ranks:
    """Four processes over gloo, which make two nodes of two."""
    return Ranks(pools("cpu"), NETWORK_RANKS)


@pytest.fixture(scope="module")
def six() -> Iterator[Ranks]:
    """Six ranks: three nodes of two, of which sums over nodes tell their order, or two of three, for sums within."""
    with RankPool(6, "cpu") as pool:
        yield Ranks(pool, 6)


@pytest.fixture
def stand_ins() -> Iterator[StandIns]:
    """In place of the GPUs of four ranks of backend "nvlink"; each launch is kept."""
    with StandIns(4) as made, torch.no_grad():
        made.keeps = True
        yield made


@pytest.fixture
def new_three() -> NewRanks:
    """Three processes that end with the test."""
    return NewRanks(3)


@pytest.fixture
def new_four() -> NewRanks:
    """Four processes that end with the test."""
    return NewRanks(4)


@pytest.fixture
def emulated_two() -> Any:
    """Two ranks on the emulator, also where other groups are not."""
    return emulator.ranks(2)


@pytest.fixture
def emulated_four() -> Any:
    """Four of them."""
    return emulator.ranks(4)


@pytest.fixture
def emulated_64() -> Any:
    """As many as kernels serve."""
    return emulator.ranks(MAX_RANKS)


def _hopper_params() -> list[Any]:
    if emulator.ON:
        return [pytest.param(n, id=f"emulated{n}") for n in GROUP_SIZES if n <= CPU_RANKS]
    if WHY_NO_HOPPER is not None:
        return [pytest.param(1, id="cuda", marks=[pytest.mark.gpu, pytest.mark.skip(reason=WHY_NO_HOPPER)])]
    return [pytest.param(n, id=f"cuda{n}", marks=pytest.mark.gpu) for n in GROUP_SIZES if n <= GPU_RANKS]


@pytest.fixture(scope="session", params=_hopper_params())
def hoppers(request: pytest.FixtureRequest, pools: Callable[[str], RankPool]) -> Any:
    """Groups of 1, 2, 4 (and 8) Hopper GPUs, for tests of what only backend "nvlink" does.

    On the emulator, modules that say EMULATED have theirs too.
    """
    if emulator.ON:
        return emulator.ranks(request.param)
    return Ranks(pools("cuda"), request.param)


@pytest.fixture(scope="session")
def several(hoppers: Ranks) -> Ranks:
    """Those of two ranks or more, of which one can be missing, late, or of another opinion."""
    if hoppers.num_ranks == 1:
        pytest.skip("a rank alone has no others")
    return hoppers


@pytest.fixture(scope="session")
def own_gpus(hoppers: Ranks) -> Ranks:
    """Those of which each rank has a GPU for itself: processes of the test's own, and memory that is counted."""
    if hoppers.shares_gpus:
        pytest.skip("ranks share GPUs")
    return hoppers


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.option.markexpr != "not slow and not soak":
        return None
    return "slow tests are left out: pytest -m slow runs them, pytest -m '' runs all"


@pytest.hookimpl(tryfirst=True)  # before pytest goes by the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("slow_on")
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if marker is not None and parameters.get("ranks") in [("cpu", size) for size in marker.args]:
            item.add_marker("slow")
    leave_out_what_cannot_be(config, items)
    skip_without_gpus(items)
    mark_all_but_samples(items)
    mark_what_shows_nothing_new(items)
    config.stash[COLLECTED] = {item.nodeid for item in items}


def skip_without_gpus(items: list[pytest.Item]) -> None:
    """Skip tests whose marker asks for more GPUs than there are. ``may_share``: ranks may share them.

    tools/run_gpu_tests.py gives a test as many as the same number says.
    """
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None or not marker.args:
            continue
        number = marker.args[0]
        if number > (GPU_RANKS if marker.kwargs.get("may_share") else NUM_GPUS):
            item.add_marker(pytest.mark.skip(reason=f"needs {number} NVIDIA GPUs"))


def mark_all_but_samples(items: list[pytest.Item]) -> None:
    """The first of a ``sampled`` test's parameters stays as it is, and every so many; on each kind of group."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is None or item.get_closest_marker("slow") is not None:
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        test = (item.path, getattr(item, "originalname", ""), parameters.get("ranks"), parameters.get("backend"))
        if seen[test] % marker.args[0]:
            item.add_marker("slow")
        seen[test] += 1


def mark_what_shows_nothing_new(items: list[pytest.Item]) -> None:
    """Mark slow parameters ``full`` too, except those that show each value of each parameter TIMES.

    What runs by default counts. A test that gives its parameters the marker itself knows better. In modules that say
    EXPERIMENTAL all slow tests are full: those of calls between nodes, which have not run on several hosts.
    """
    for item in items:
        if getattr(item.module, "EXPERIMENTAL", False) and item.get_closest_marker("slow") is not None:
            item.add_marker("full")
    tests: dict[tuple[Any, ...], list[pytest.Item]] = {}
    for item in items:
        on_gpus = item.get_closest_marker("gpu") is not None
        if hasattr(item, "callspec") and item.get_closest_marker("soak") is None:
            test = (item.path, item.cls, item.originalname, on_gpus)  # type: ignore[attr-defined]
            tests.setdefault(test, []).append(item)

    def values(item: pytest.Item) -> list[tuple[Any, ...]]:
        given: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
        shown: list[tuple[Any, ...]] = [(name, repr(value)) for name, value in given.items()]
        if emulator.ON:  # there CI runs groups of one size
            return [(*each, group_size(item)) for each in shown]
        if item.get_closest_marker("gpu") is None:
            return shown
        alone = group_size(item) in (None, 1)  # a rank alone has no peers, so it shows nothing of what several do
        return shown + [(*each, alone) for each in shown]

    for (*_, on_gpus), own in tests.items():
        if any(item.get_closest_marker("full") is not None for item in own):
            continue
        quick = [] if on_gpus else [item for item in own if item.get_closest_marker("slow") is None]
        for item in left_out(own, values, quick, TIMES):
            item.add_marker("full")


def group_size(item: pytest.Item) -> int | None:
    """Ranks of the group that a test runs on, None where it has no group."""
    given: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
    for group in ("ranks", "group", "pool"):
        if group in given:
            return int(given[group][1])
    return given.get("hoppers")


def leave_out_what_cannot_be(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of backend "nvlink" exist for Hopper GPUs only, and for rows that its bulk copies can move.

    Those of "network" exist for groups that make two nodes of two.
    """

    def exists(item: pytest.Item) -> bool:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if emulator.ON and getattr(item.module, "EMULATED", False):
            return True
        if "ranks" in parameters and parameters.get("backend") == "network":
            return parameters["ranks"][1] == NETWORK_RANKS
        if emulator.ON and ("ranks" not in parameters or parameters.get("backend") != "nvlink"):
            return False
        if parameters.get("backend") != "nvlink":
            return True
        case = parameters.get("case")
        moves = case is None or (case.hidden % 8 == 0 and case.dtype != torch.float64)
        moves = moves and torch.float64 not in (parameters.get("dtype"), parameters.get("y_dtype"))
        return (emulator.ON or (parameters["ranks"][0] == "cuda" and HOPPER)) and moves

    config.hook.pytest_deselected(items=[item for item in items if not exists(item)])
    items[:] = [item for item in items if exists(item)]


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not NUM_GPUS, reason="no NVIDIA GPU on this machine")]
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """For tests of one process."""
    if request.param == "cuda":
        # Autograd's own thread has no CUDA context before its first kernel; if a cuBLAS call comes first, torch warns.
        torch.ones(1, device="cuda", requires_grad=True).exp().backward()
    return request.param
