"""Which backend is picked, given what works on every rank, and how one is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.cases import Case, expert_rows, make_comm, make_problem, same_bits, same_routed
from tests.support.layer_cases import LayerCase, make_inputs, make_layer
from tests.support.on_ranks import on_ranks
from tests.support.toy_backend import ToyBackend, make, toy
from tokenloom import reference
from tokenloom.backends import registry
from tokenloom.backends.nodes import gin, padded
from tokenloom.backends.peers import backend as peers_backend
from tokenloom.backends.peers.backend import NvlinkBackend
from tokenloom.backends.peers.buffers import data_layout
from tokenloom.backends.registry import Availability, Registration, Request
from tokenloom.backends.seam import Capabilities
from tokenloom.plan import Plan
from tokenloom.runtime.processes import RankContext
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.topology import Topology, pretended
from tokenloom.training.shards import local_part

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# -- which one is picked --------------------------------------------------------------------------------------------


def found(nvlink: bool = True, why: str = "own kernels", host: str = "a", gpu: str = "x") -> list[Availability]:
    """What one rank finds."""
    others = [Availability("network", True, "nccl"), Availability("collective", True, "nccl")]
    return [Availability("nvlink", nvlink, why, {"host": host, "gpu": gpu}), *others]


def test_auto_picks_the_best_that_works_everywhere() -> None:
    """One rank alone, and many, each with a GPU of its own."""
    assert registry.choose("auto", [found()]) == ("nvlink", [])
    assert registry.choose("auto", [found(gpu=name) for name in "wxyz"]) == ("nvlink", [])


@pytest.mark.parametrize(
    ("by_rank", "reason"),
    [
        ([found(False, "no driver")] * 2, "nvlink does not work on every rank: no driver"),
        ([found(), found(False, "no driver")], "nvlink does not work on rank 1: no driver"),
        (
            [found(gpu="x"), found(gpu="y"), found(gpu="x", host="b")],
            "nvlink does not work on rank 2: it is on another host than rank 0",
        ),
        (
            [found(gpu="x"), found(gpu="y"), found(gpu="y")],
            "nvlink does not work on rank 2: it shares its GPU with rank 1",
        ),
    ],
)
def test_what_fails_on_one_rank_is_no_choice(by_rank: list[list[Availability]], reason: str) -> None:
    """All ranks take the same backend: auto goes on to the next one and says why, a name that was asked for raises."""
    assert registry.choose("auto", by_rank) == ("collective", [reason])
    assert registry.choose("collective", by_rank)[0] == "collective"
    with pytest.raises(tl.BackendUnavailable) as raised:
        registry.choose("nvlink", by_rank)
    assert str(raised.value) == f"{reason}; use backend='auto'"


def test_nothing_works() -> None:
    """Every reason is told."""
    nothing = [Availability(name, False, why) for name, why in (("nvlink", "no driver"), ("network", "no"))]
    nothing.append(Availability("collective", False, "no network"))
    with pytest.raises(tl.BackendUnavailable) as raised:
        registry.choose("auto", [nothing])
    assert "no driver" in str(raised.value)
    assert "no network" in str(raised.value)


ONE, TWO = Topology.together(4), pretended(4, 2)


@pytest.mark.parametrize(
    ("topology", "picked", "reasons"),
    [
        (None, "nvlink", []),
        (ONE, "nvlink", []),
        (TWO, "network", ["nvlink does not work here: it runs on one node, the ranks are on 2"]),
        (
            Topology((0, 0, 0, 1)),
            "collective",
            ["nvlink does not work here: it runs on one node", "network does not work here: nodes have unequal"],
        ),
        (
            Topology((0, 1, 0, 1)),
            "collective",
            [
                "nvlink does not work here: it runs on one node",
                "network does not work here: ranks are not in the order",
            ],
        ),
        (
            pretended(4, 1),
            "collective",
            ["nvlink does not work here: it runs on one node", "network does not work here: each node has one rank"],
        ),
    ],
    ids=["unknown", "one node", "two nodes", "unequal", "out of order", "one rank each"],
)
def test_nodes_decide(topology: Topology | None, picked: str, reasons: list[str]) -> None:
    """Several equal nodes take "network"; other nodes say why not, and one node says nothing of it."""
    by_rank = [found(gpu=name) for name in "wxyz"]
    name, why = registry.choose("auto", by_rank, topology)
    assert name == picked
    assert len(why) == len(reasons)
    assert all(text.startswith(start) for text, start in zip(why, reasons, strict=True))
    assert registry.choose("collective", by_rank, topology)[0] == "collective"


def test_what_crosses_nodes_decides() -> None:
    """A backend is passed over if it reaches other nodes by something else; on one node nothing crosses."""
    by_rank = [[Availability("toy", True, "wood"), *found(gpu=name)] for name in "wxyz"]
    with registered(Registration("toy", Capabilities(other_nodes="gin"), toy().probe, make)):
        for between_nodes, picked in (("auto", "toy"), ("gin", "toy"), ("collective", "network")):
            assert registry.choose("auto", by_rank, TWO, between_nodes)[0] == picked
        assert registry.choose("auto", by_rank, ONE, "collective")[0] == "toy"
        with pytest.raises(
            tl.BackendUnavailable, match="toy does not work here: it reaches other nodes by gin, trans"
        ):
            registry.choose("toy", by_rank, TWO, "collective")


@pytest.mark.parametrize(
    ("name", "topology", "reason"),
    [
        ("nvlink", TWO, "nvlink does not work here: it runs on one node, the ranks are on 2; use backend='auto'"),
        ("network", ONE, "network does not work here: all ranks are on one node; pass ranks_per_node"),
        ("gin", ONE, "all ranks are on one node; on Hopper GPUs, pass ranks_per_node"),
        ("padded", ONE, "all ranks are on one node; on Hopper GPUs, pass ranks_per_node"),
        (
            "network",
            Topology((0, 0), doubt="ranks see different nodes: rank 0 sees"),
            "ranks see different nodes: rank",
        ),
    ],
)
def test_asked_for_on_other_nodes(name: str, topology: Topology, reason: str) -> None:
    """The reason, and what to do."""
    with pytest.raises(tl.BackendUnavailable, match=reason):
        registry.choose(name, [found(gpu=gpu) for gpu in "wxyz"[: len(topology.node_of)]], topology)


def test_a_rank_that_comes_back_knows_no_nodes_yet() -> None:
    """It names its backend, and is believed; the others check that they have the same."""
    assert registry.choose("network", [found()], None)[0] == "network"


@pytest.mark.parametrize(
    ("plan", "dtype", "why"),
    [
        (Plan(2, 2, 8, 1, 1), torch.float64, "its kernels have no float64"),
        (Plan(2, 2, 4, 1, 1), None, "rows of 4 bfloat16 values are no multiple of 16 bytes"),
        (Plan(65, 65, 8, 1, 1), None, "it serves at most 64 ranks"),
        (Plan(64, 64, 8, 1, 1), None, "it needs a GPU, the tensors are on cpu"),
        (None, None, "it needs a GPU, the tensors are on cpu"),
    ],
)
def test_what_the_kernels_do_not_do(plan: Plan | None, dtype: torch.dtype | None, why: str) -> None:
    """Said before anything is made; the other backend takes all of it."""
    nvlink, _, collective, *_ = registry.availability("gloo", torch.device("cpu"), plan, dtype)
    assert (nvlink.works, nvlink.why) == (False, why)
    assert collective.works


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan], Availability]:
    """What the probe of "nvlink" says on a GPU that could run the kernels, of which a trial kernel is loaded."""
    for name, value in (
        ("get_device_capability", lambda device: (9, 0)),
        ("get_device_name", lambda device: "a Hopper GPU"),
        ("get_device_properties", lambda device: torch.tensor(0)),
        ("device_count", lambda: 1),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "uuid", "the GPU", raising=False)
    for name in ("load_nvrtc", "load_driver"):
        monkeypatch.setattr(peers_backend, name, lambda: None)
    monkeypatch.setattr(peers_backend, "Kernel", lambda spec, index: None)
    monkeypatch.setattr(peers_backend, "usable_sms", lambda index: 132)
    return lambda plan: peers_backend.probe(Request("nccl", torch.device("cuda", 0), plan=plan))


def test_more_experts_than_a_block_can_count(hopper: Callable[[Plan], Availability]) -> None:
    """Auto takes the other backend instead of failing at the first dispatch."""
    assert hopper(Plan(8, 256, 7168, 8, 4096)).works
    answer = hopper(Plan(8, 65536, 7168, 8, 4096))
    assert not answer.works
    assert "use fewer experts" in answer.why


def test_more_ranks_than_have_run(hopper: Callable[[Plan], Availability]) -> None:
    """It is said where nobody has tried so many on GPUs."""
    assert hopper(Plan(8, 256, 7168, 8, 4096)).why == "own kernels on a Hopper GPU"
    assert hopper(Plan(64, 256, 7168, 8, 512)).why.endswith("; no more than 8 ranks have run on GPUs yet")


def test_more_ranks_than_some_kernels_serve() -> None:
    """Those between nodes and those of a MegaMoE have a lane, or a bit of a word, for each."""
    plan = Plan(33, 33, 128, 1, 1)
    for name, probe in (("padded", padded.probe), ("gin", gin.probe)):
        assert probe(Request("nccl", torch.device("cuda"), plan=plan, name=name)).why == "it serves at most 32 ranks"
    with pytest.raises(tl.InvalidArgument, match="at most 32 ranks, and the group has 33; use backend='composed'"):
        NvlinkBackend.fused_layer(mock.Mock(_plan=plan), 0, "block")


@pytest.mark.parametrize("error", [tl.KernelCompileError("no such file\nsecond line"), RuntimeError("old driver")])
def test_the_trial_kernel_fails(
    hopper: Callable[[Plan], Availability], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A driver that is too old for the compiler's kernels is found out before the ranks agree."""

    def fail(spec: object, index: int) -> None:
        raise error

    monkeypatch.setattr(peers_backend, "Kernel", fail)
    answer = hopper(Plan(8, 256, 7168, 8, 4096))
    assert not answer.works
    assert answer.why == str(error).splitlines()[0]


@pytest.mark.parametrize("value_bytes", [2, 4])
@pytest.mark.parametrize("plan", [Plan(8, 256, 7168, 8, 4096), Plan(3, 21, 8, 5, 7)], ids=["large", "odd"])
def test_the_two_receive_buffers_are_alike(plan: Plan, value_bytes: int) -> None:
    """Kernels are told where things lie in the first, and how far it is to the second: the same for all of them."""
    for rows in (1, 5000):
        offset = data_layout(plan, value_bytes, rows).offset
        names = ("rows", "row_scales", "row_ids", "row_weights", "row_places", "row_tokens")
        assert {offset(f"{name}1") - offset(f"{name}0") for name in names} == {offset("rows1") - offset("rows0")}


@on_ranks("four")
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_rank_that_fails_between_two_steps(context: RankContext, step: int) -> None:
    """The others are at the next one, and hear of it there. All take the next backend, with that rank's reason."""

    def make_in_steps(request: Request, ranks: RankGroup) -> Any:
        for number in range(2):
            if (context.rank, number) == (2, step):
                raise RuntimeError("no room")
            agree(ranks, lambda: ({}, None), f"step {number}")
        if (context.rank, step) == (2, 2):
            raise RuntimeError("no room")
        return make(request, ranks)

    with registered(replace(toy(), make=make_in_steps)), tl.Communicator(context.group, **SIZES) as comm:
        assert comm.backend == "collective"
        assert "toy does not work on rank 2: it failed when it was made: no room" in comm.describe()


# -- one more -------------------------------------------------------------------------------------------------------


@contextmanager
def registered(entry: Registration) -> Iterator[None]:
    """In this block the toy comes before all others."""
    with mock.patch.object(registry, "_registered", [entry, *registry._registered]):
        yield


SIZES: dict[str, Any] = {"num_experts": 8, "hidden": 16, "top_k": 2, "max_tokens_per_rank": 8}


def without_toy(context: RankContext) -> str:
    """The group works, and nothing is left of the toy. Returns: the backend that "auto" picks then."""
    with tl.Communicator(context.group, device=context.device, **SIZES) as comm:
        assert "toy" not in comm.describe()
        ids = torch.zeros(1, 2, dtype=torch.int64, device=context.device)
        comm.dispatch(torch.zeros(1, 16, device=context.device), ids, layout="token")
        return comm.backend


def test_ranks_have_registered_other_backends(four: Ranks) -> None:
    """What each found was taken for what the others found of another one: ranks made different backends."""
    assert four.run(check_others_registered) == ["collective"] * 4


def check_others_registered(context: RankContext) -> str:
    with (
        registered(toy()) if context.rank == 2 else nullcontext(),
        pytest.raises(tl.PlanMismatch, match=r"rank 2 has backends=toy, nvlink, .*, rank 0 has backends=nvlink, n"),
    ):
        tl.Communicator(context.group, **SIZES)
    return without_toy(context)


@on_ranks
def test_a_backend_from_outside(context: RankContext) -> None:
    """One module and one registration: "auto" and its name find it, calls and layers run on it, and what it cannot do
    is refused by what it says of itself. Nothing in the package knows its name."""
    problem = make_problem(Case("toy", "", tokens=(5, 0, 3), unused=0.2, top_k=3, dtype=FP32), context.num_ranks)
    with registered(toy()):
        for backend in ("auto", "toy"):
            with make_comm(context, backend, problem.plan) as comm:
                assert comm.backend == "toy"
                assert "backend toy: made of wood\n    a toy's memory: 0 MB" in comm.describe()
                for layout in ("token", "expert"):
                    there_and_back(context, comm, problem, layout)
                refuses(context, comm, problem)
                there_and_back(context, comm, problem, "expert")
                called = set(comm.engine._backend.called)  # type: ignore[attr-defined]
            assert called == {"dispatch", "combine"}
        layers_run(context)
    with pytest.raises(tl.InvalidArgument, match="backend is 'toy', expected one of auto, nvlink, network, coll"):
        make_comm(context, "toy", problem.plan)
    without_toy(context)


def there_and_back(context: RankContext, comm: tl.Communicator, problem: Any, layout: str) -> None:
    want = problem.dispatched(layout)
    routed = comm.dispatch(*problem.arguments(context), layout=layout)
    same_routed(routed, want[context.rank], problem.plan)
    ys = expert_rows(problem, want, FP32)
    weights = problem.topk_weights if layout == "expert" else None
    outs = reference.combine(problem.plan, ys, want, problem.topk_ids, weights)
    same_bits(comm.combine(ys[context.rank].to(context.device), routed), outs[context.rank], layout)


def refuses(context: RankContext, comm: tl.Communicator, problem: Any) -> None:
    """On all ranks, and on the last one alone, of which the others then hear."""
    x, ids, weights = problem.arguments(context)
    routed = comm.dispatch(x, ids, weights)
    y = torch.zeros_like(routed.tokens)
    alone = context.rank == context.num_ranks - 1
    calls: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
        ("layout is 'rank', expected one of token, expert", comm.dispatch, {"x": x, "layout": "rank"}),
        ("strategy is 'all_gather', this backend has dedup", comm.dispatch, {"x": x, "strategy": "all_gather"}),
        ("x is torch.float16, expected bfloat16, float32,", comm.dispatch, {"x": x.to(FP16)}),
        ("wire_dtype is torch.float16, expected bfloat16, float32", comm.combine, {"wire_dtype": FP16}),
        ("mode is 'per_route', this backend has per_rank", comm.combine, {"mode": "per_route"}),
    ]
    for text, call, wrong in calls:
        good = (
            {"x": x, "topk_ids": ids, "topk_weights": weights} if call == comm.dispatch else {"y": y, "routed": routed}
        )
        with pytest.raises((tl.InvalidArgument, tl.DtypeMismatch), match=text):
            call(**(good | wrong))
        with pytest.raises(tl.TokenloomError) as raised:
            call(**(good | wrong if alone else good))
        assert isinstance(raised.value, tl.PeerError) != alone
        assert text[:20] in str(raised.value)


def layers_run(context: RankContext) -> None:
    """A layer, its gradients and its checkpoint: the same bits as on "collective"."""
    case = LayerCase(dtype=FP32)
    xs, factors = make_inputs(case, context.num_ranks)
    results = []
    for backend in ("auto", "collective"):
        layer = make_layer(case, context.group, backend=backend, device=context.device)
        x = xs[context.rank].to(context.device).requires_grad_()
        out, aux_loss = layer(x)
        ((out * factors[context.rank].to(context.device)).sum() + aux_loss / context.num_ranks).backward()
        assert x.grad is not None
        results.append([out, x.grad, *(local_part(parameter.grad) for parameter in layer.parameters())])
        tl.gather_state_dict(layer)
        if backend == "auto":
            assert layer.comm.backend == "toy"
            called = set(layer.comm.engine._backend.called)  # type: ignore[attr-defined]
            gradients = {"resend", "send_weight_gradients"}
            assert called >= {"dispatch", "combine"} | gradients
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    for strategy, lacks in (
        (tl.Strategy(dispatch="all_gather"), "dispatch by 'all_gather'"),
        (tl.Strategy(combine="reduce_scatter"), "combine by 'reduce_scatter'"),
    ):
        with pytest.raises(tl.InvalidArgument, match=f"{lacks}, this backend has dedup"):
            make_layer(case, context.group, strategy=strategy, device=context.device)


# -- making one that fails ------------------------------------------------------------------------------------------


def failing(context: RankContext, rank: int, error: Exception, closed: list[int] | None = None) -> Any:
    """A ``make`` that fails on one rank."""

    def make_or_fail(request: Request, ranks: RankGroup) -> ToyBackend:
        if context.rank == rank:
            raise error
        backend = make(request, ranks)
        if closed is not None:
            backend.close = lambda: closed.append(context.rank)  # type: ignore[method-assign]
        return backend

    return make_or_fail


@on_ranks
def test_a_backend_that_cannot_be_made(context: RankContext) -> None:
    """A process that cannot map another's memory, say: under "auto" all ranks go on to the next backend and say why.
    Asked for by name it is unavailable on all of them. What the others had made is closed."""
    odd, closed = context.num_ranks - 1, []
    expected = without_toy(context)
    reason = f"toy does not work on {'every rank' if odd == 0 else f'rank {odd}'}: it failed when it was made: no glue"
    with registered(toy(failing(context, odd, RuntimeError("no glue"), closed))):
        with tl.Communicator(context.group, device=context.device, **SIZES) as comm:
            assert comm.backend == expected
            assert f"  not picked: {reason}" in comm.describe().splitlines()
        with pytest.raises(tl.BackendUnavailable) as raised:
            tl.Communicator(context.group, device=context.device, backend="toy", **SIZES)
        assert str(raised.value) == f"{reason}; use backend='auto'"
    assert closed == ([] if context.rank == odd else [context.rank] * 2)
    without_toy(context)


@on_ranks("several_ranks")
def test_others_fail_because_of_one(context: RankContext) -> None:
    """Making one is collective, so a fault on one rank is PeerError on the others; the reason is that of the one."""
    odd = context.num_ranks - 1

    def make_together(request: Request, ranks: RankGroup) -> ToyBackend:
        def prepare() -> tuple[dict[str, Any], None]:
            if context.rank == odd:
                raise RuntimeError("no glue")
            return {}, None

        agree(ranks, prepare, "gluing")
        raise AssertionError("all ranks know of the fault")

    with registered(toy(make_together)), tl.Communicator(context.group, device=context.device, **SIZES) as comm:
        assert f"toy does not work on rank {odd}: it failed when it was made: no glue" in comm.describe()


@pytest.mark.parametrize("backend", ["auto", "toy"])
@pytest.mark.parametrize("error", [tl.InvalidArgument("num_sms is 99"), torch.OutOfMemoryError("no room")], ids=repr)
def test_faults_that_no_other_backend_cures(ranks: Ranks, error: Exception, backend: str) -> None:
    """A wrong argument, or no memory: that rank's own error, and PeerError on the others, under "auto" too."""
    ranks.run(check_fatal, type(error), str(error), backend)


def check_fatal(context: RankContext, kind: type[Exception], text: str, backend: str) -> None:
    odd, closed = context.num_ranks - 1, []
    with registered(toy(failing(context, odd, kind(text), closed))):
        with pytest.raises(kind if context.rank == odd else tl.PeerError) as raised:
            tl.Communicator(context.group, device=context.device, backend=backend, **SIZES)
        if isinstance(raised.value, tl.PeerError):
            assert (raised.value.rank, raised.value.reason) == (odd, text)
            assert closed == [context.rank]
        else:
            assert str(raised.value) == text
    without_toy(context)


def test_an_interrupt_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for this rank's verdict, which does not come."""
    interrupt, aborted = KeyboardInterrupt("the test"), []

    def make_slowly(request: Request, ranks: RankGroup) -> ToyBackend:
        raise interrupt

    monkeypatch.setattr(RankGroup, "abort", lambda ranks, fault: aborted.append(fault))
    with registered(toy(make_slowly)), pytest.raises(KeyboardInterrupt):
        tl.Communicator(None, device="cpu", **SIZES)
    assert aborted == [interrupt]


def no_odd_ranks(by_rank: Sequence[Availability]) -> list[tuple[int, str]]:
    return [(rank, "it is odd") for rank in range(1, len(by_rank), 2)]


@on_ranks
def test_objections(context: RankContext) -> None:
    """What ranks can tell only together, and what one can tell alone: "auto" goes on, a name raises."""
    expected = without_toy(context)
    entries = {"it is broken": toy(works=False)}
    if context.num_ranks > 1:
        entries["it is odd"] = toy(objections=no_odd_ranks)
    for why, entry in entries.items():
        with registered(entry):
            with tl.Communicator(context.group, device=context.device, **SIZES) as comm:
                assert comm.backend == expected
                assert why in comm.describe()
            with pytest.raises(tl.BackendUnavailable, match=why):
                tl.Communicator(context.group, device=context.device, backend="toy", **SIZES)
