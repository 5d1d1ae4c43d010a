"""What clients get wrong: the error names it, all ranks hear of it where one alone fails, and the next call works."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.compat.test_deep_gemm import weights_for
from tests.support.on_ranks import on_ranks
from tokenloom.compat import deep_ep, deep_gemm
from tokenloom.compat.deep_ep.events import EventHandle
from tokenloom.compat.deep_ep.faults import BadCall, NotServed, naming
from tokenloom.compat.deep_ep.routing_maps import Routes
from tokenloom.runtime.processes import RankContext

HIDDEN, WIDTH, ROOM = 128, 128, 8
BF16 = torch.bfloat16
CPU = torch.device("cpu")


# -- deep_gemm --------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[torch.Tensor, Any, Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "y has 200 rows": lambda y, w1, w2: ((y.new_empty(200, HIDDEN), w1, w2), {}),
    "activation_clamp is -1": lambda y, w1, w2: ((y, w1, w2), {"activation_clamp": -1.0}),
    "recipe is ": lambda y, w1, w2: ((y, w1, w2), {"recipe": (1, 1, 128)}),
    "num_tokens_bound is 1": lambda y, w1, w2: ((y, w1, w2), {"num_tokens_bound": 1}),
    "w1 is ": lambda y, w1, w2: ((y, (w1[0][:, :HIDDEN], w1[1]), w2), {}),
}


@on_ranks("four")
@pytest.mark.parametrize("said", CALLS)
def test_a_call_of_a_layer(context: RankContext, said: str) -> None:
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(context.group, context.num_ranks, ROOM, 1, HIDDEN, WIDTH)
    w1, w2 = deep_gemm.transform_weights_for_mega_moe_sm90(*weights_for(HIDDEN, WIDTH))
    y = torch.empty(2, HIDDEN, dtype=BF16)
    deep_gemm.fp8_mega_moe(y, w1, w2, buffer)
    if context.rank == 1:
        given, options = CALLS[said](y, w1, w2)
        with pytest.raises(tl.TokenloomError, match=said):
            deep_gemm.fp8_mega_moe(*given, buffer, **options)
    else:
        with pytest.raises(tl.PeerError, match=f"rank 1 failed.*{said}"):
            deep_gemm.fp8_mega_moe(y, w1, w2, buffer)
    deep_gemm.fp8_mega_moe(y, w1, w2, buffer)
    buffer.destroy()


@on_ranks("four")
def test_options_of_a_layer(context: RankContext) -> None:
    sizes = (context.group, context.num_ranks, ROOM, 1, HIDDEN, WIDTH)
    error, shared = (tl.InvalidArgument, 1) if context.rank == 1 else (tl.PeerError, 0)
    with pytest.raises(error, match="num_shared_experts is 1"):
        deep_gemm.get_symm_buffer_for_mega_moe(*sizes, num_shared_experts=shared)
    deep_gemm.get_symm_buffer_for_mega_moe(*sizes).destroy()


def layer_of_one() -> tl.MegaMoE:
    sizes = {"num_experts": 1, "hidden": HIDDEN, "intermediate": WIDTH, "top_k": 1, "max_tokens_per_rank": ROOM}
    return tl.MegaMoE(None, backend="composed", device="cpu", **sizes)


def test_weights_of_a_layer() -> None:
    layer = layer_of_one()
    w1, w2 = torch.zeros(1, 2 * WIDTH, HIDDEN, dtype=BF16), torch.zeros(1, HIDDEN, WIDTH, dtype=BF16)
    with pytest.raises(tl.InvalidArgument, match="w2 is a NoneType"):
        layer.load_weights(w1, None)  # type: ignore[arg-type]
    with pytest.raises(tl.DtypeMismatch, match="which has no scales"):
        layer.load_weights(w1, w2, torch.ones(1, 2, 1), torch.ones(1, 1, 1))
    layer.load_weights(w1, w2)
    with pytest.raises(tl.InvalidArgument, match="topk_ids is a NoneType"):
        layer(torch.zeros(1, HIDDEN, dtype=BF16), None, torch.ones(1, 1))  # type: ignore[arg-type]


# -- deep_ep ----------------------------------------------------------------------------------------------------


def test_maps_with_more_routes_than_columns() -> None:
    """Where the host may not look, an id that is none says that routes were left out."""
    routing_map = torch.tensor([[True, False, True, False], [False, True, False, False]])
    routing = Routes(None, None, routing_map, None, 4, 2, CPU)
    assert routing.by_token(2)[0].tolist() == [[0, 2], [1, -1]]
    assert routing.by_token(1)[0].tolist() == [[4], [1]]
    probs = torch.rand(2, 4)
    weights = Routes(None, None, routing_map, probs, 4, 2, CPU).by_token(1)[1]
    assert weights is not None
    assert weights[1].tolist() == probs[1, 1:2].tolist()
    wide = Routes(None, None, torch.ones(1, 40, dtype=torch.bool), None, 40, 1, CPU)
    for non_blocking in (False, True):
        with pytest.raises(NotServed, match="a token with 40 experts"):
            wide.width(non_blocking)


@on_ranks("four")
def test_deep_ep(context: RankContext) -> None:
    buffer = deep_ep.Buffer(context.group, low_latency_mode=True, enable_shrink=True)
    for rank, said in ((context.rank, "rank_to_mask is"), (context.num_ranks, "rank_to_mask is")):
        with pytest.raises(BadCall, match=said):
            buffer.low_latency_update_mask_buffer(rank, True)
    with pytest.raises(BadCall, match="no call was made yet"):
        buffer.low_latency_update_mask_buffer((context.rank + 1) % context.num_ranks, True)
    x, ids = torch.ones(2, HIDDEN, dtype=BF16), torch.zeros(2, 1, dtype=torch.int64)
    num_experts = context.num_ranks
    _, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 2, num_experts, use_fp8=False)
    for rows in (None, (x, x)):
        with pytest.raises(BadCall, match="x is a"):
            buffer.low_latency_combine(rows, ids, torch.ones(2, 1), handle)  # type: ignore[arg-type]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, num_experts)
    counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    with pytest.raises(BadCall, match="the event to wait for is an int"):
        buffer.dispatch(x, topk_idx=ids, topk_weights=torch.ones(2, 1), previous_event=7, **counts)
    buffer.dispatch(x, topk_idx=ids, topk_weights=torch.ones(2, 1), previous_event=EventHandle(), **counts)


@on_ranks("four")
@pytest.mark.parametrize("masks", [False, True])
def test_two_hidden_sizes(context: RankContext, masks: bool) -> None:
    """A fault is told by the communicator that the others call, or later calls of both would have other numbers, and
    one that has connections of its own would not hear it. If ids are no tensor, the width alone says which it is."""
    buffer = deep_ep.Buffer(context.group, enable_shrink=masks)

    def dispatch(hidden: int, dtype: torch.dtype = torch.float32, as_list: bool = False) -> None:
        x, ids = torch.ones(2, hidden, dtype=BF16), torch.zeros(2, 1, dtype=torch.int64)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, context.num_ranks)
        counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        buffer.dispatch(
            x, topk_idx=ids.tolist() if as_list else ids, topk_weights=torch.ones(2, 1, dtype=dtype), **counts
        )

    dispatch(128)
    dispatch(256)
    with pytest.raises(tl.TokenloomError, match="topk_weights"):
        dispatch(128, torch.float64 if context.rank == 1 else torch.float32)
    dispatch(128)
    dispatch(256)
    with pytest.raises(tl.TokenloomError, match="topk_idx is a list"):
        dispatch(128, as_list=context.rank == 1)
    dispatch(128)
    dispatch(256)


def buffer_of(context: RankContext, kind: str) -> Callable[[int, int, bool], Any]:
    """A dispatch of one buffer, by number of experts and of routes, right or with a wrong dtype."""
    tokens, hidden = 3, 128

    def tensors(num_experts: int, top_k: int, bad: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.arange(top_k).expand(tokens, top_k).contiguous() % num_experts
        weights = torch.ones(tokens, top_k, dtype=torch.float64 if bad else torch.float32)
        return torch.ones(tokens, hidden, dtype=BF16), ids, weights

    if kind == "hybrid":
        hybrid = deep_ep.HybridEPBuffer(context.group, hidden, ROOM, 1)

        def call(num_experts: int, top_k: int, bad: bool) -> Any:
            x, ids, weights = tensors(num_experts, top_k, bad)
            local = num_experts // context.num_ranks
            return hybrid.dispatch_with_permute(
                hidden=x, topk_idx=ids, topk_weights=weights, num_of_experts_per_rank=local
            )

    elif kind == "elastic":
        elastic = deep_ep.ElasticBuffer(context.group)

        def call(num_experts: int, top_k: int, bad: bool) -> Any:
            return elastic.dispatch(*tensors(num_experts, top_k, bad), num_experts=num_experts)

    else:
        fast = kind in ("low latency", "masking")
        buffer = deep_ep.Buffer(context.group, low_latency_mode=fast, enable_shrink=kind == "masking")

        def call(num_experts: int, top_k: int, bad: bool) -> Any:
            x, ids, weights = tensors(num_experts, top_k, bad)
            if fast:
                return buffer.low_latency_dispatch(x, ids.int() if bad else ids, ROOM, num_experts)
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, num_experts)
            counts = {
                "num_tokens_per_rank": per_rank,
                "is_token_in_rank": in_rank,
                "num_tokens_per_expert": per_expert,
            }
            return buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **counts)

    return call


@on_ranks("four")
@pytest.mark.parametrize("shapes", [((4, 2), (8, 2)), ((8, 2), (8, 3))], ids=["experts", "routes"])
@pytest.mark.parametrize("kind", ["normal", "low latency", "masking", "elastic", "hybrid"])
def test_two_kinds_of_layers(context: RankContext, kind: str, shapes: tuple[tuple[int, int], ...]) -> None:
    """Of one width. A fault is told where the others make the call; and rows of openings are equally long, whichever
    communicator it is."""
    call = buffer_of(context, kind)
    for shape in shapes:
        call(*shape, False)
    with pytest.raises(tl.DtypeMismatch if context.rank == 1 else tl.PeerError, match=r"torch\.(float64|int32)"):
        call(*shapes[0], context.rank == 1)
    for shape in (*reversed(shapes), *shapes):
        call(*shape, False)


@pytest.mark.parametrize("number", [4.0, "4", 3, 0])
def test_numbers_of_sms(number: Any) -> None:
    with pytest.raises(BadCall, match="is not even and positive"):
        deep_ep.Buffer.set_num_sms(number)


# -- the words of deep_ep ---------------------------------------------------------------------------------------

OVERFLOW = tl.CapacityOverflow(40, 32, sent=True)
LATE = tl.PeerTimeout(0, [1], "the handshake of dispatch", 7, "no answer within 30 s")
NOT_MASKABLE = tl.InvalidArgument(
    "ranks cannot be masked over nccl with tensors on cuda; make the communicator with backend='nvlink', or on a gloo "
    "group with device='cpu'"
)
OURS = ("capacity=", "topk_ids", "pool_rows", " timeout_s", "communicator", "send_dispatch", "receive(", " max_tokens")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("Buffer.dispatch", OVERFLOW, "pass num_worst_tokens=40"),
        ("Buffer.low_latency_dispatch", OVERFLOW, "name each expert once"),
        ("ElasticBuffer.dispatch", OVERFLOW, "pass a larger num_max_tokens_per_rank"),
        ("HybridEPBuffer.dispatch_with_permute", OVERFLOW, "pass num_permuted_tokens=40"),
        ("Buffer.combine", LATE, "Destroy this buffer. .* make a new process group, and a buffer on it"),
        ("Buffer.low_latency_update_mask_buffer", NOT_MASKABLE, "make the buffer where NVLink reaches all ranks, or"),
        ("ElasticBuffer.combine", LATE, "num_gpu_timeout_secs, or num_cpu_timeout_secs"),
        ("Buffer.combine", tl.CommunicatorBroken("it is over; make a new communicator"), "make a new buffer"),
        ("Buffer.low_latency_dispatch", tl.ShapeMismatch("pass max_tokens_per_rank=9"), "num_max_dispatch_tokens_per"),
        ("ElasticBuffer.dispatch", tl.ShapeMismatch("pass max_tokens_per_rank=9"), "pass num_max_tokens_per_rank=9"),
        ("Buffer.dispatch", tl.PeerError(1, "InvalidExpertId: topk_ids[0, 1] is 9"), r"topk_idx\[0, 1\]"),
    ],
)
def test_errors_from_below_name_what_the_client_knows(call: str, error: tl.TokenloomError, said: str) -> None:
    """Twice, since a call may be a part of another: the words stay as they are."""

    @naming(call)
    @naming(call)
    def fail() -> None:
        raise copy.copy(error)

    with pytest.raises(type(error), match=said) as raised:
        fail()
    assert str(raised.value).startswith(f"{call}: ")
    assert not [word for word in OURS if word in str(raised.value)]


@on_ranks("four")
def test_a_hook_that_nobody_calls(context: RankContext) -> None:
    buffer = deep_ep.Buffer(context.group, explicitly_destroy=True)
    x, ids = torch.ones(2, HIDDEN, dtype=BF16), torch.zeros(2, 1, dtype=torch.int64)

    def dispatch(**options: Any) -> Any:
        return buffer.low_latency_dispatch(x, ids, ROOM, context.num_ranks, use_fp8=False, **options)

    dispatch(return_recv_hook=True)
    gc.collect()
    with pytest.raises(tl.InvalidArgument, match="the hook of an earlier dispatch was dropped uncalled") as raised:
        dispatch()
    assert not [word for word in OURS if word in str(raised.value)]
    dispatch()
    buffer.destroy()


@on_ranks("four")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(context: RankContext) -> None:
    """They have no shape to be asked for, so that the first question failed untold."""
    buffer = deep_ep.Buffer(context.group, explicitly_destroy=True)
    elastic = deep_ep.ElasticBuffer(context.group, num_max_tokens_per_rank=ROOM, explicitly_destroy=True)
    experts = context.num_ranks
    x, ids, weights = torch.ones(2, HIDDEN, dtype=BF16), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    layout = buffer.get_dispatch_layout(ids, experts)
    given = {"num_tokens_per_rank": layout[0], "num_tokens_per_expert": layout[2], "is_token_in_rank": layout[3]}
    calls: list[Callable[[Any, Any], object]] = [
        lambda x, ids: buffer.dispatch(x, **given, topk_idx=ids, topk_weights=weights),
        lambda x, ids: buffer.low_latency_dispatch(x, ids, ROOM, experts, use_fp8=False),
        lambda x, ids: elastic.dispatch(x, ids, weights, num_experts=experts),
    ]
    for call in calls:
        call(x, ids)
        for bad in ((torch.nested.nested_tensor([*x]), ids), (x, torch.nested.nested_tensor([*ids]))):
            if context.rank == 1:
                with pytest.raises(tl.InvalidArgument, match="nested tensor"):
                    call(*bad)
            else:
                with pytest.raises(tl.PeerError, match=r"rank 1 failed.*nested tensor"):
                    call(x, ids)
        call(x, ids)
    elastic.destroy()
    buffer.destroy()
