"""What a first program prints and what it gets wrong: one line that says what there is, one error with one cure."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tokenloom as tl
from tests.conftest import Ranks
from tokenloom.errors import a_type
from tokenloom.runtime.processes import RankContext

COMM: dict[str, Any] = {"num_experts": 8, "hidden": 128, "top_k": 2, "max_tokens_per_rank": 16}
LAYER: dict[str, Any] = COMM | {"hidden": 64, "intermediate": 32}
MEGA: dict[str, Any] = COMM | {"intermediate": 128, "backend": "composed"}
PROFILE: dict[str, Any] = {"num_tokens": 8, "hidden": 64, "intermediate": 32, "num_experts": 8, "top_k": 2}

MAKERS: dict[str, Callable[..., Any]] = {
    "Communicator": lambda group=None, **options: tl.Communicator(group, **COMM | options),
    "MegaMoE": lambda group=None, **options: tl.MegaMoE(group, **MEGA | options),
    "ExpertParallelMoE": lambda group=None, **options: tl.ExpertParallelMoE(group, **LAYER | options),
    "RoutedExperts": lambda group=None, **options: tl.RoutedExperts(group, **LAYER | options),
    "profile": lambda group=None, **options: tl.tune.profile(group, **PROFILE | options),
}


def said_by(call: Callable[[], Any], error: type[Exception] = tl.InvalidArgument) -> str:
    """The message of the only error that a reader sees: nothing of torch's, and none of ours before it."""
    with pytest.raises(error) as raised:
        call()
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("Traceback (most recent call last)") == 1
    return str(raised.value)


# -- what is printed ----------------------------------------------------------------------------------------------


def test_a_communicator_says_what_it_is() -> None:
    with tl.Communicator(**COMM) as comm:
        sizes = "num_experts=8, hidden=128, top_k=2, max_tokens_per_rank=16, backend='collective'"
        assert repr(comm) == f"Communicator(rank=0, num_ranks=1, {sizes})"
    assert repr(comm) == f"Communicator(rank=0, num_ranks=1, {sizes}, closed)"
    comm.close()
    assert repr(comm).endswith(", closed)")


def test_a_mega_moe_says_what_it_is() -> None:
    with tl.MegaMoE(**MEGA, num_shared_experts=1) as mega:
        sizes = "num_experts=8, hidden=128, top_k=2, max_tokens_per_rank=16, intermediate=128, num_shared_experts=1"
        assert repr(mega) == f"MegaMoE(rank=0, num_ranks=1, {sizes}, backend='composed')"
    assert repr(mega) == f"MegaMoE(rank=0, num_ranks=1, {sizes}, backend='composed', closed)"


def test_what_was_never_made_can_be_shown() -> None:
    """By a debugger, or by pytest, while its constructor raises."""
    assert repr(tl.Communicator.__new__(tl.Communicator)) == "Communicator(never made)"
    assert repr(tl.MegaMoE.__new__(tl.MegaMoE)) == "MegaMoE(never made)"


def test_a_layer_and_a_dispatch_say_what_they_are() -> None:
    layer = tl.ExpertParallelMoE(**LAYER)
    for word in ("softmax_topk", "hidden=64", "intermediate=32", "experts=8", "top_k=2", "ranks=1", "collective"):
        assert word in repr(layer)
    with tl.Communicator(**COMM) as comm:
        routed = comm.dispatch(torch.ones(4, 128), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2))
        assert repr(routed) == "Routed(layout='expert', tokens=[8, 128] torch.float32)"


def check_repr(context: RankContext) -> None:
    sizes = COMM | {"num_experts": 2 * context.num_ranks}
    with tl.Communicator(context.group, **sizes, device=context.device) as comm:
        assert repr(comm).startswith(f"Communicator(rank={context.rank}, num_ranks={context.num_ranks}, num_experts=")
        comm.engine.ranks._watch.broken = "as a wait that has timed out leaves it"
        assert repr(comm).endswith(", broken)")


def test_each_rank_says_which_it_is(ranks: Ranks) -> None:
    if ranks.num_ranks != 2 or ranks.pool.device != "cpu":
        pytest.skip("two ranks on the CPU show what there is to see")
    ranks.run(check_repr)


# -- a group that is none -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [4, -100.5, "world", [0, 1], torch.device("cpu"), dist], ids=str)
@pytest.mark.parametrize("what", MAKERS)
def test_a_group_that_is_none(what: str, group: Any) -> None:
    """It was torch's own text, of a default group that has not been initialised."""
    assert said_by(lambda: MAKERS[what](group)) == (
        f"group is {group!r}, expected a torch.distributed ProcessGroup, a DeviceMesh, or None; pass None for the "
        "default group"
    )


# -- other mistakes -----------------------------------------------------------------------------------------------

DEVICE = "expected 'cpu', or a GPU such as 'cuda' or 'cuda:0'"
DTYPE = "expected a torch.dtype, such as torch.bfloat16"


@pytest.mark.parametrize(
    ("what", "wrong", "said"),
    [
        ("Communicator", {"backend": "foo"}, "backend is 'foo', expected one of auto, nvlink, network, collective"),
        ("Communicator", {"transport": "foo"}, "transport is 'foo', expected one of auto, collective, gin, nvlink"),
        ("Communicator", {"device": "foo"}, f"device is 'foo', {DEVICE}"),
        ("Communicator", {"device": 3.5}, f"device is 3.5, {DEVICE}"),
        ("Communicator", {"device": "meta"}, f"device is 'meta', {DEVICE}"),
        ("Communicator", {"dtype": "bf16"}, f"dtype is 'bf16', {DTYPE}"),
        ("Communicator", {"checked": "yes"}, "checked is 'yes', expected True or False"),
        ("Communicator", {"on_timeout": "skip"}, "on_timeout is 'skip', expected 'raise' or 'mask'"),
        (
            "Communicator",
            {"ranks_per_node": 2},
            "ranks_per_node is 2, expected a divisor of 1, the ranks of the group",
        ),
        ("Communicator", {"rejoin": True}, "rejoin is True, but this rank is alone and nobody can take it back"),
        ("ExpertParallelMoE", {"device": "foo"}, f"device is 'foo', {DEVICE}"),
        ("ExpertParallelMoE", {"dtype": "bf16"}, f"dtype is 'bf16', {DTYPE}"),
        ("ExpertParallelMoE", {"comm": "c"}, "comm is 'c', expected a tl.Communicator, or None"),
        ("ExpertParallelMoE", {"router": "foo"}, "router is 'foo', expected a Router or one of softmax_topk, "),
        ("ExpertParallelMoE", {"router": tl.Router(16, 2)}, "router chooses 2 of 16 experts, expected 2 of 8; pass"),
        ("ExpertParallelMoE", {"shared_gate": True}, "shared_gate is True, but there is no shared expert; pass"),
        ("RoutedExperts", {"comm": 3}, "comm is 3, expected a tl.Communicator, or None"),
        (
            "MegaMoE",
            {"activation": "relu"},
            "activation is 'relu', which has no gates, as FP8 kernels need them; pass",
        ),
        ("profile", {"dtype": "bf16"}, f"dtype is 'bf16', {DTYPE}"),
    ],
)
def test_options_that_are_wrong(what: str, wrong: dict[str, Any], said: str) -> None:
    assert said_by(lambda: MAKERS[what](**wrong)).startswith(said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"device": "cuda"}, tl.InvalidArgument, r"device is 'cuda', which torch cannot use here"),
        ({"backend": "nvlink"}, tl.BackendUnavailable, "use backend='auto'"),
        ({"transport": "nvlink"}, tl.BackendUnavailable, "use transport='auto'"),
        ({"backend": "network"}, tl.BackendUnavailable, "all ranks are on one node; pass ranks_per_node to take them"),
    ],
)
def test_what_this_machine_lacks(wrong: dict[str, Any], error: type[Exception], said: str) -> None:
    """One cure each: where the reason says what to pass, nothing else is advised."""
    text = said_by(lambda: tl.Communicator(**COMM | wrong), error)
    assert said in text
    assert sum(text.count(each) for each in ("; use ", "; pass ")) == 1


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: tl.split_parameters(3), tl.InvalidArgument, "module is an int, expected a torch.nn.Module"),
        (lambda: tl.gather_state_dict("m"), tl.InvalidArgument, "module is a str, expected a torch.nn.Module"),
        (lambda: tl.shard_state_dict({}, {}), tl.InvalidArgument, "module is a dict, expected a torch.nn.Module"),
        (
            lambda: tl.shard_state_dict(nn.Linear(1, 1), 3),
            tl.InvalidArgument,
            "full is an int, expected the dict from",
        ),
        (lambda: tl.clip_grad_norm_("ab", 1.0), tl.InvalidArgument, "a parameter is a str, expected a torch.Tensor"),
        (lambda: tl.quantize_fp8("a"), tl.InvalidArgument, "x is a str, expected a torch.Tensor"),
        (lambda: tl.quantize_fp8(torch.ones(3, 100)), tl.ShapeMismatch, "x is [3, 100], expected a last dimension"),
        (lambda: tl.quantize_fp8(torch.ones(())), tl.ShapeMismatch, "x is [], expected a last dimension"),
        (lambda: tl.quantize_fp8_blocks(None), tl.InvalidArgument, "w is a NoneType, expected a torch.Tensor"),
        (lambda: tl.grouped_gemm_fp8(1, 2, 3, 4, 5), tl.InvalidArgument, "a is an int, expected a torch.Tensor"),
        (lambda: tl.interleave_gate_and_up(torch.ones(3)), tl.ShapeMismatch, "w1 is [3], expected [E, 2I, K]"),
        (lambda: tl.interleave_gate_and_up(torch.ones(1, 8, 3)), tl.ShapeMismatch, "with I a multiple of 8"),
    ],
)
def test_functions_that_are_given_something_else(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    assert said in said_by(call, error)


def test_data_parallel_without_a_process_group() -> None:
    if dist.is_initialized():
        pytest.skip("there is one")
    assert "call torch.distributed.init_process_group() first" in said_by(lambda: tl.data_parallel(nn.Linear(1, 1)))


def test_names_of_types() -> None:
    found = [a_type(each) for each in (3, "a", [], None, torch.ones(1).numpy(), tl)]
    assert found == ["an int", "a str", "a list", "a NoneType", "an ndarray", "a module"]
