"""Options that are of no type that they could have: a list, above all, which cannot be looked up in a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenloom as tl

DISPATCH = [
    ("layout", ["token"], "layout is ['token'], expected one of "),
    ("sizes", ["exact"], "sizes is ['exact'], expected one of "),
    ("scale_layout", ["rows"], "scale_layout is ['rows'], expected one of "),
    ("recipe", ["row"], "recipe is ['row'], expected one of "),
    ("strategy", ["dedup"], "strategy of dispatch is ['dedup'], expected one of "),
    ("copy", [True], "copy is [True], expected False, True or 'if_needed'"),
    ("copy", {"if_needed": True}, "copy is {'if_needed': True}, expected False, True or 'if_needed'"),
]
COMBINE = [
    ("mode", ["per_rank"], "mode is ['per_rank'], expected one of "),
    ("weighted", [True], "weighted is [True], expected True, False or None"),
    ("weighted", 1, "weighted is 1, expected True, False or None"),
    ("wire_dtype", [torch.float32], "wire_dtype is [torch.float32], expected bfloat16, "),
    ("out_dtype", [torch.float32], "out_dtype is [torch.float32], expected bfloat16, "),
]


def make_call() -> tuple[tl.Communicator, tuple[torch.Tensor, ...]]:
    comm = tl.Communicator(num_experts=4, hidden=8, top_k=2, max_tokens_per_rank=3, device="cpu")
    return comm, (torch.ones(3, 8), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))


@pytest.mark.parametrize(("name", "value", "said"), DISPATCH)
def test_dispatch(name: str, value: Any, said: str) -> None:
    comm, arguments = make_call()
    with pytest.raises(tl.InvalidArgument) as raised:
        comm.dispatch(*arguments, **{name: value})
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(("name", "value", "said"), COMBINE)
def test_combine(name: str, value: Any, said: str) -> None:
    """What is no dtype is a DtypeMismatch, as a dtype is that nobody sends."""
    comm, arguments = make_call()
    routed = comm.dispatch(*arguments)
    with pytest.raises(tl.DtypeMismatch if "dtype" in name else tl.InvalidArgument) as raised:
        comm.combine(routed.tokens, routed, **{name: value})
    assert str(raised.value).startswith(said)


def test_a_cpu_with_a_number() -> None:
    comm = tl.Communicator(None, num_experts=2, hidden=16, top_k=1, max_tokens_per_rank=2, device="cpu:0")
    assert comm.device == torch.device("cpu")
    routed = comm.dispatch(torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.int64))
    assert routed.tokens.device == torch.device("cpu")
    comm.close()


def test_other_names() -> None:
    with pytest.raises(tl.InvalidArgument, match=r"^activation is \['silu'\], expected an Activation or one of"):
        tl.Activation.of(["silu"])  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"num_experts": 4, "hidden": 128, "intermediate": 128, "top_k": 2}
    with pytest.raises(tl.InvalidArgument, match=r"^backend is \['composed'\], expected one of nvlink, "):
        tl.MegaMoE(**sizes, max_tokens_per_rank=3, device="cpu", backend=["composed"])  # type: ignore[arg-type]
