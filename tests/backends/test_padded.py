"""Backend "padded" with its own host code on the emulator, whose all-to-all takes its place in the stream.

What it does as "gin" does is in test_gin.py.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.backends.test_gin import CASE, SOON_S, comm_of, ranks_on, there_and_back
from tests.support import emulator
from tests.support.cases import make_problem
from tests.support.emulator.graphs import capture
from tests.support.on_ranks import on_ranks
from tokenloom.backends import registry
from tokenloom.backends.nodes import REGISTRATIONS, memory, padded
from tokenloom.backends.nodes.padded import PaddedLauncher, PaddedMemory
from tokenloom.backends.peers.opening import Half
from tokenloom.backends.registration import Availability, Request
from tokenloom.kernels.common.rail import Rail
from tokenloom.plan import Plan
from tokenloom.runtime.openings import CallKind
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.topology import Topology, pretended

EXPERIMENTAL = True

pytestmark = pytest.mark.skipif(emulator.CXX is None, reason="no g++")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (6, 2)], ids=str)
def test_bits_on_other_nodes(sizes: tuple[int, int]) -> None:
    emulator.ranks(sizes[0]).run(check_nodes, sizes[1])


def check_nodes(context: RankContext, ranks_per_node: int) -> None:
    problem = make_problem(CASE, context.num_ranks)
    with comm_of(context, problem.plan, "padded", ranks_per_node=ranks_per_node) as comm:
        for layout in ("slots", "rank") * 2:
            there_and_back(context, comm, problem, layout)
        comm.check()


@on_ranks("emulated_four")
@pytest.mark.slow
def test_a_half_that_expires_sends_no_old_rows(context: RankContext) -> None:
    """The all-to-all carries its regions all the same, and their memory may have had rows of such a call before."""
    problem = make_problem(CASE, context.num_ranks)
    comm = comm_of(context, problem.plan, "padded", timeout_s=SOON_S)
    made: Any = comm.engine._backend
    routed = comm.dispatch(*problem.arguments(context), layout="rank", sizes="bounded")
    regions: list[torch.Tensor] = []
    new = PaddedMemory.new_regions

    def same_again(self: PaddedMemory, rail: Rail) -> torch.Tensor:
        if not regions:
            regions.append(new(self, rail))
        rail.put_from, rail.put_to = regions[0][0].data_ptr(), regions[0][1].data_ptr()
        return regions[0]

    made._memory.new_regions = same_again.__get__(made._memory)
    comm.combine(routed.tokens, routed)
    comm.check()
    torch.distributed.barrier()
    if context.rank == 1:  # makes no call, but does not hold up its rail
        regions[0].zero_()
        made._memory.exchange(regions[0])
        return

    def call() -> None:
        comm.combine(routed.tokens, routed)
        comm.check()

    with pytest.raises(tl.TokenloomError) as error:
        call()
    if context.rank == 0:
        assert isinstance(error.value, tl.PeerTimeout)
        assert error.value.peers == (1,)
    if context.rank == 2:
        assert isinstance(error.value, tl.PeerError)
        assert error.value.rank == 0


@on_ranks("emulated_four")
def test_what_it_says_of_itself(context: RankContext) -> None:
    problem = make_problem(CASE, context.num_ranks)
    with comm_of(context, problem.plan, "padded") as comm:
        assert comm.transports == {"own node": "nvlink", "other nodes": "collective"}
        assert "regions of a call" in comm.describe()
        assert comm.engine.capabilities.captures
        there_and_back(context, comm, problem, "slots")


def test_all_calls_exchange_the_same_sizes() -> None:
    """So a rank that fails can open a call of either kind, and no all-to-all is of two sizes."""
    plan = Plan(4, 256, 7168, 8, 128)
    ranks = ranks_on(4, 2)
    with mock.patch.multiple(memory, SymmetricBuffer=mock.Mock(), free_bytes=lambda _: 2**40):
        made = PaddedMemory(plan, ranks, None)
    rail = Rail()
    made.tell(rail, 0)
    regions = made.new_regions(rail)
    assert regions.shape == (2, 2, made.regions.region_bytes)
    assert rail.put_to - rail.put_from == regions[0].nbytes
    assert (rail.base, rail.turn_bytes, rail.chunks, rail.chunk_rows) == (0, 0, 1, 128)
    made.exchange(regions)
    (sent, *counts, _), out = ranks.start_all_to_all.call_args.args, ranks.start_all_to_all.call_args.kwargs["out"]
    assert counts == [[0, 1, 0, 1]] * 2
    assert (sent.data_ptr(), out.data_ptr()) == (rail.put_from, rail.put_to)
    assert made.new_regions(rail).data_ptr() != regions.data_ptr(), "another call may still be open"


def test_the_stream_waits_for_the_collective() -> None:
    """It begins behind the first kernel of a call, and the second comes behind its end."""
    order: list[str] = []
    ranks: Any = mock.Mock(device=torch.device("cpu"))
    buffers: Any = mock.Mock()
    buffers.new_regions.return_value = torch.empty(1)
    buffers.exchange.side_effect = lambda regions: (
        order.append("begins") or mock.Mock(wait=lambda: order.append("ends"))  # type: ignore[func-returns-value]
    )
    kernels: Any = [mock.Mock(), mock.Mock()]
    with (
        mock.patch("tokenloom.backends.nodes.launcher.Launcher.__init__"),
        mock.patch(
            "tokenloom.backends.nodes.launcher.Launcher.launch",
            side_effect=lambda kernel, *_, **__: order.append(f"kernel {kernels.index(kernel)}"),
        ),
        mock.patch.object(PaddedLauncher, "keep_with_graphs", [], create=True),
    ):
        made = PaddedLauncher(Plan(4, 8, 16, 2, 8), ranks, buffers, 2)
        half, kind = Half(None, 0, kernels[1]), CallKind({"call": "dispatch"})
        made.launch(kernels[0], kind, 0, begins=half)
        made.launch(kernels[1], kind, 0, finishes=half)
    assert order == ["kernel 0", "begins", "ends", "kernel 1"]


def test_where_it_works() -> None:
    """For whoever asks for it by its name, over NCCL; "auto" stays with what it took before."""
    few = Request("nccl", torch.device("cuda"), name="padded", plan=Plan(4, 8, 16, 2, 8))
    ready = {"require_sms": mock.Mock()}
    with (
        mock.patch.multiple(padded, **ready),
        mock.patch.object(padded, "why_no_kernels", return_value=None),
    ):
        assert padded.probe(few).works
        for request, why in {
            replace(few, name="auto"): "only backend='padded' takes it",
            replace(few, transport="gloo"): "it needs a process group over nccl, this one is over gloo",
        }.items():
            found = padded.probe(request)
            assert not found.works
            assert why in found.why
    working = [[Availability(name, True, "") for name in registry.names()]] * 4
    assert registry.choose("auto", working, pretended(4, 2), "collective")[0] == "network"
    assert registry.choose("padded", working, pretended(4, 2), "collective")[0] == "padded"
    assert "all ranks are on one node" in str(REGISTRATIONS[-1].why_not_on(Topology.together(4)))


@on_ranks("emulated_four")
def test_a_capture_that_is_given_up(context: RankContext) -> None:
    """Regions of a call whose second half nobody can launch any more go with its first half."""
    problem = make_problem(CASE, context.num_ranks)
    arguments, options = problem.arguments(context), {"layout": "slots", "capacity": problem.rows_needed("slots")}
    with comm_of(context, problem.plan, "padded") as comm:
        there_and_back(context, comm, problem, "slots")
        with pytest.raises(InterruptedError):
            give_up(comm, arguments, **options)
        with pytest.raises(tl.InvalidArgument, match="dropped unreceived"):
            comm.dispatch(*arguments, **options)
        gc.collect()
        assert not comm.engine._backend._launcher._under_way  # type: ignore[attr-defined]
        there_and_back(context, comm, problem, "slots")


def give_up(comm: tl.Communicator, arguments: tuple[Any, ...], **options: Any) -> None:
    with capture():
        _pending = comm.send_dispatch(*arguments, **options)
        raise InterruptedError
