"""DeepGEMM's layer in programs that are not its tests: modes of torch, parameters, faults of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenloom as tl
from tests.conftest import Ranks
from tests.support.stand_ins import StandIns
from tokenloom.compat import deep_gemm
from tokenloom.jit.kernel import Kernel
from tokenloom.runtime.processes import RankContext

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, ROWS = 4, 256, 128, 2, 10


def make_buffer(group: Any, most: Any = ROWS) -> deep_gemm.SM90SymmBuffer:
    return deep_gemm.get_symm_buffer_for_mega_moe(group, EXPERTS, most, TOP_K, HIDDEN, INTERMEDIATE)


def weights(local: int, seed: int = 0) -> tuple[deep_gemm.mega.Weights, deep_gemm.mega.Weights]:
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(local, 2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
    w2 = torch.randn(local, HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
    return deep_gemm.transform_weights_for_mega_moe_sm90(tl.quantize_fp8_blocks(w1), tl.quantize_fp8_blocks(w2))


def fill(buffer: deep_gemm.SM90SymmBuffer, requires_grad: bool = False) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, HIDDEN, generator=generator).to(BF16)
    topk_weights, ids = torch.rand(ROWS, EXPERTS, generator=generator).topk(TOP_K)
    given = (x, ids, topk_weights.requires_grad_(requires_grad))
    places = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    deep_gemm.mega_moe_pre_dispatch_sm90(*given, *places, num_tokens=ROWS)


def result(buffer: deep_gemm.SM90SymmBuffer, local: int = EXPERTS) -> torch.Tensor:
    y = torch.full((ROWS, HIDDEN), torch.nan, dtype=BF16)
    deep_gemm.fp8_mega_moe(y, *weights(local), buffer)
    return y


def test_a_buffer_of_inference_mode_is_filled_outside() -> None:
    """A server makes it in its first call."""
    with torch.inference_mode():
        buffer = make_buffer(None)
        fill(buffer)
        wanted = result(buffer)
    fill(buffer)
    assert torch.equal(result(buffer), wanted)


def test_weights_of_a_router_that_learns() -> None:
    """Kernels know no gradients, so nobody has to detach what they take."""
    buffer = make_buffer(None)
    fill(buffer)
    wanted = result(buffer)
    fill(buffer, requires_grad=True)
    assert not buffer.topk_weights.requires_grad
    assert torch.equal(result(buffer), wanted)


def test_parameters_with_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are loaded anew into the same parameters: kernels read the new ones, not what was freed."""
    seen: dict[bool, Any] = {}
    launch = Kernel.launch

    def record(kernel: Kernel, blocks: int, stream: int) -> None:
        if kernel.spec.name == "grouped_gemm":
            seen[bool(dict(kernel.spec.shape)["swiglu"])] = kernel.args.b_scales
        launch(kernel, blocks, stream)

    monkeypatch.setattr(Kernel, "launch", record)
    buffer = make_buffer(None)
    with StandIns(2):
        sizes = {"num_experts": 2 * EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K}
        buffer.mega = tl.MegaMoE(None, **sizes, max_tokens_per_rank=128, device="cpu")
        l1, l2 = ([torch.nn.Parameter(each, False) for each in pair] for pair in weights(EXPERTS))
        for seed in (1, 2):
            y = torch.zeros(ROWS, HIDDEN, dtype=BF16)
            deep_gemm.fp8_mega_moe(y, l1, l2, buffer)  # type: ignore[arg-type]
            assert seen == {True: l1[1].data_ptr(), False: l2[1].data_ptr()}
            for pair, others in zip((l1, l2), weights(EXPERTS, seed), strict=True):
                for parameter, other in zip(pair, others, strict=True):
                    parameter.data = other


WRONG_RESULTS = {"nothing": None, "a list": [0.0], "a number": torch.tensor(1.0), "a row": torch.zeros(HIDDEN)}


def check_wrong_results(context: RankContext) -> None:
    local = EXPERTS // context.num_ranks
    buffer = make_buffer(context.group)
    fill(buffer)
    wanted = result(buffer, local)
    for wrong in WRONG_RESULTS.values():
        if context.rank == 0:
            with pytest.raises(tl.ShapeMismatch, match=r"^y is .*, expected a tensor \[M, H\]"):
                deep_gemm.fp8_mega_moe(wrong, *weights(local), buffer)  # type: ignore[arg-type]
        else:
            with pytest.raises(tl.PeerError, match="y is "):
                result(buffer, local)
        assert torch.equal(result(buffer, local), wanted)


def four_bit_weights(local: int) -> tuple[deep_gemm.mega.Weights, deep_gemm.mega.Weights]:
    """Packed, w1 then w2: all values are 1."""
    rows, depths = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    l1, l2 = (
        (torch.full((local, n, k // 2), 0x22, dtype=torch.uint8), torch.ones(local, n, k // 32))
        for n, k in zip(rows, depths, strict=True)
    )
    return l1, l2


def check_wrong_four_bits(context: RankContext) -> None:
    """What is told of the call with weights that were four-bit, beside what the one with FP8 tells."""
    local = EXPERTS // context.num_ranks
    buffer = make_buffer(context.group)
    fill(buffer)
    packed = four_bit_weights(local)
    encoded = deep_gemm.transform_weights_for_mega_moe_sm90_fp4(*packed)
    y = torch.zeros(ROWS, HIDDEN, dtype=BF16)
    deep_gemm.fp8_fp4_mega_moe(y, *encoded, buffer)
    wanted = y.clone()
    assert wanted.any()
    bad: dict[str, tuple[Any, dict[str, Any]]] = {
        r"recipe is \(128, 128, 128\), activation is 'swiglu'; there are \(1, 1, 32\) and": (
            encoded,
            {"recipe": (128, 128, 128)},
        ),
        r"recipe is \(1, 1, 32\), activation is 'situ'": (encoded, {"activation": "situ"}),
        "w1 is torch.uint8, which is packed; take weights from transform_weights": (packed, {}),
        "activation_clamp is -1": (encoded, {"activation_clamp": -1.0}),
    }
    for said, (given, options) in bad.items():
        if context.rank == 0:
            with pytest.raises((tl.InvalidArgument, tl.DtypeMismatch), match=said):
                deep_gemm.fp8_fp4_mega_moe(y, *given, buffer, **options)
        else:
            with pytest.raises(tl.PeerError, match=f"rank 0 failed.*{said}"):
                deep_gemm.fp8_fp4_mega_moe(y, *encoded, buffer)
        deep_gemm.fp8_fp4_mega_moe(y.zero_(), *encoded, buffer)
        assert torch.equal(y, wanted)


def check_wrong_sizes(context: RankContext) -> None:
    for wrong in (None, "16", 16.0, 0, -1):
        error = tl.InvalidArgument if context.rank == 0 else tl.PeerError
        with pytest.raises(error, match="max_tokens_per_rank is"):
            make_buffer(context.group, wrong if context.rank == 0 else ROWS)
    make_buffer(context.group).destroy()


@pytest.mark.parametrize("check", [check_wrong_results, check_wrong_four_bits, check_wrong_sizes])
def test_a_fault_of_one_rank(ranks: Ranks, check: Any) -> None:
    """The others hear of it at once, and the next call is all ranks' again."""
    if ranks.device != "cpu":
        pytest.skip("what is checked comes before kernels")
    ranks.run(check)
