"""MegaMoE in all modes of torch, with weights as programs have them, and with what it cannot take."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.support.mega_cases import assert_near
from tokenloom import reference

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 256, 128, 2


def make_mega(**options: Any) -> tl.MegaMoE:
    sizes = {
        "num_experts": EXPERTS,
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "top_k": TOP_K,
        "max_tokens_per_rank": 16,
    }
    return tl.MegaMoE(None, backend="composed", **(sizes | options))


def weights(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w1, w2 = (
        torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator),
        torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator),
    )
    return w1 / HIDDEN**0.5, w2 / INTERMEDIATE**0.5


def fp8_weights() -> tuple[torch.Tensor, ...]:
    """w1, w2 and their scales."""
    (w1, w1_scales), (w2, w2_scales) = (tl.quantize_fp8_blocks(each) for each in weights())
    return w1, w2, w1_scales, w2_scales


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(10, HIDDEN, generator=generator).to(torch.bfloat16)
    topk_weights, ids = torch.rand(10, EXPERTS, generator=generator).topk(TOP_K)
    return x, ids, topk_weights


# -- modes --------------------------------------------------------------------------------------------------------


def test_autocast_changes_nothing() -> None:
    """Sums are float32, as kernels have them, in a model that runs under autocast too."""
    with make_mega(num_shared_experts=1) as mega:
        mega.load_weights(*(torch.cat([each, each[:1]]) for each in weights()))
        want = mega(*inputs())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(mega(*inputs()), want)


def test_weights_of_inference_mode_are_loaded_over_outside() -> None:
    biases = {"w1_bias": torch.ones(EXPERTS, 2 * INTERMEDIATE), "w2_bias": torch.ones(EXPERTS, HIDDEN)}
    with make_mega() as mega:
        with torch.inference_mode():
            mega.load_weights(*weights(5), **biases)
            mega(*inputs())
        mega.load_weights(*weights(), **biases)
        found = mega(*inputs())
    with make_mega() as mega:
        mega.load_weights(*weights(), **biases)
        assert torch.equal(found, mega(*inputs()))


def test_parameters_are_copied_without_a_graph() -> None:
    """Else the copies would keep what was given alive, once for each time that it is loaded."""
    w1, w2, *scales = fp8_weights()
    given = [
        torch.nn.Parameter(each)
        for each in (*scales, torch.ones(EXPERTS, 2 * INTERMEDIATE), torch.ones(EXPERTS, HIDDEN))
    ]
    with make_mega() as mega:
        for _ in range(2):
            mega.load_weights(w1, w2, *given[:2], w1_bias=given[2], w2_bias=given[3])
        assert not any(each is not None and each.requires_grad for each in (*mega.weights, *mega.biases))
        alive = [weakref.ref(each) for each in given]
        given.clear()
        gc.collect()
        assert not any(each() is not None for each in alive)


# -- weights ------------------------------------------------------------------------------------------------------


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one value behind where 16-byte copies begin."""
    values = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    room = torch.cat([values.new_zeros(1), values.flatten()])
    return room[1:].view(tensor.shape).view(tensor.dtype)


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, column by column."""
    values = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    return values.transpose(1, 2).contiguous().transpose(1, 2).view(tensor.dtype)


@pytest.mark.parametrize("laid", [elsewhere, turned])
@pytest.mark.parametrize("given", [weights, fp8_weights])
def test_weights_lie_anywhere(laid: Any, given: Any) -> None:
    """They are copied: parts of a checkpoint, or views, need no copy before."""
    with make_mega() as mega, make_mega() as other:
        mega.load_weights(*given())
        other.load_weights(*(laid(each) for each in given()))
        assert torch.equal(mega(*inputs()), other(*inputs()))


def test_shared_experts_begin_anywhere() -> None:
    """Behind three experts, scales of the shared one begin at no multiple of 16 bytes; calls find them all the same,
    also after weights were loaded over them."""
    outs = []
    with make_mega(num_experts=3, num_shared_experts=1) as mega:
        x, ids, topk_weights = inputs()
        for seed in (2, 3):
            w1, w2 = weights(seed)
            mega.load_weights(w1, w2)
            assert mega.weights[3][3:].data_ptr() % 16
            outs.append(mega(x, ids % 3, topk_weights))
            (w1, w1_scales), (w2, w2_scales) = tl.quantize_fp8_blocks(w1), tl.quantize_fp8_blocks(w2)
            given = (x, ids % 3, topk_weights, w1, w1_scales, w2, w2_scales)
            assert_near(outs[-1], reference.fused_layer(*given, num_shared_experts=1))
    assert not torch.equal(*outs)


INTERLEAVED = {"weight_layout": tl.WeightLayout(interleaved=True)}
WRONG_WEIGHTS: dict[str, tuple[dict[str, Any], type[tl.TokenloomError], str]] = {
    "layout": ({"weight_layout": "transposed"}, tl.InvalidArgument, "weight_layout is 'transposed', expected"),
    "scales": ({"w1_scales": [1.0]}, tl.InvalidArgument, "w1_scales is a list, expected a torch.Tensor"),
    "bias": ({"w2_bias": [1.0]}, tl.InvalidArgument, "w2_bias is a list, expected a torch.Tensor"),
    "odd": (
        {"w1": torch.ones(EXPERTS, 255, HIDDEN), **INTERLEAVED},
        tl.ShapeMismatch,
        r"w1 is \[4, 255, 256\], expected",
    ),
    "flat": ({"w1": torch.ones(255), **INTERLEAVED}, tl.ShapeMismatch, r"w1 is \[255\], expected"),
    "flat bias": ({"w1_bias": torch.ones(256), **INTERLEAVED}, tl.ShapeMismatch, r"w1_bias is \[256\], expected"),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_wrong_weights_are_named(name: str) -> None:
    wrong, error, said = WRONG_WEIGHTS[name]
    w1, w2 = weights()
    with make_mega() as mega, pytest.raises(error, match=f"^{said}"):
        mega.load_weights(**{"w1": w1, "w2": w2, **wrong})


# -- tensors of a call --------------------------------------------------------------------------------------------


def test_fp8_tokens_come_as_a_list_too() -> None:
    """As ``Communicator.dispatch`` takes them, which the call makes."""
    x, ids, topk_weights = inputs()
    with make_mega(num_shared_experts=1) as mega:
        mega.load_weights(*(torch.cat([each, each[:1]]) for each in weights()))
        want = mega(tl.quantize_fp8(x), ids, topk_weights)
        assert torch.equal(mega(list(tl.quantize_fp8(x)), ids, topk_weights), want)  # type: ignore[arg-type]


WRONG_INPUTS: dict[str, tuple[dict[str, Any], type[tl.TokenloomError], str]] = {
    "ids": ({"topk_ids": torch.tensor(1)}, tl.ShapeMismatch, r"topk_ids is \[\], expected \[T, K\]"),
    "stats": ({"expert_stats": [0] * EXPERTS}, tl.InvalidArgument, "expert_stats is a list, expected a torch.Tensor"),
    "out": ({"out": [0.0]}, tl.InvalidArgument, "out is a list, expected a torch.Tensor"),
}


@pytest.mark.parametrize("name", WRONG_INPUTS)
def test_wrong_inputs_are_named(name: str) -> None:
    wrong, error, said = WRONG_INPUTS[name]
    given = dict(zip(("x", "topk_ids", "topk_weights"), inputs(), strict=True))
    with make_mega() as mega:
        mega.load_weights(*weights())
        with pytest.raises(error, match=f"^{said}"):
            mega(**{**given, **wrong})
        assert mega(**given).any()
