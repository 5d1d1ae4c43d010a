"""Epilogues of GEMMs by themselves, on the emulator: which bias and which weight belong to which register."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from tests.kernels.one_gpu import make_kernel, run
from tests.support import emulator
from tokenloom import Activation
from tokenloom.jit.compiler import KernelSpec
from tokenloom.kernels.common import int32_fields, uint64_fields
from tokenloom.kernels.gemm import launch
from tokenloom.kernels.gemm.launch import Bf16Epilogue
from tokenloom.ops.activation import apply_activation
from tokenloom.ops.gemm import separate_gate_and_up, swiglu_epilogue
from tokenloom.ops.quant import dequantize_fp8

pytestmark = pytest.mark.skipif(not emulator.ON, reason="tests/support/emulator/plugin.py is off")
EMULATED = True

EXPERTS, EXPERT = 3, 1
TILE_ROWS, TILE_COLUMNS = launch.TILE_HEIGHTS["block"][0], launch.TILE_COLUMNS["block"]
COLUMNS = 3 * 256
SHARED_BYTES = 80 * 1024


class EpiloguesArgs(ctypes.Structure):
    """Mirror of EpiloguesArgs in epilogues.cuh."""

    _fields_ = [
        *uint64_fields("sums", "out", "scales", "row_weights", "bias", "row_scales", "channel_scales"),
        ("clamp", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("up_offset", ctypes.c_float),
        *int32_fields("expert", "row", "rows", "column"),
    ]


def run_epilogue(
    shape: dict[str, int],
    n: int,
    halves: bool,
    row: int,
    rows: int,
    column: int,
    form: Activation | None = None,
    lost: int = 0,
    transposed: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Staged bytes of a tile, what it was made of, and scales. In the first ``lost`` columns of a row sums are NaN."""
    generator = torch.Generator().manual_seed(rows + column)
    recipe = "row" if transposed else "block"
    tile_rows, tile_columns = launch.TILE_HEIGHTS[recipe][-1], launch.TILE_COLUMNS[recipe]
    sums = torch.randn(tile_rows, tile_columns, generator=generator) * 2
    sums[:, :lost] = torch.nan
    bias = torch.randn(EXPERTS, n, generator=generator)
    weights = torch.rand(row + rows, generator=generator) + 0.5
    row_bytes = tile_columns // (1 if transposed else 2) if shape["swiglu"] else 2 * tile_columns
    out = torch.zeros(tile_rows, row_bytes, dtype=torch.uint8)
    row_scales = torch.rand(row + rows, generator=generator) + 0.5
    channel_scales = torch.rand(EXPERTS, n, generator=generator) + 0.5
    scales = torch.full((row + rows, max(1, n // 256)), torch.nan)
    path = str(Path(__file__).with_name("epilogues.cuh"))
    kernel = make_kernel(
        KernelSpec(
            "epilogues",
            path,
            tuple({**shape, "n": n, "halves": int(halves), "transposed": int(transposed)}.items()),
            EpiloguesArgs,
            256,
            shared_bytes=SHARED_BYTES,
        )
    )
    args, form = kernel.args, form or Activation()
    given = (sums, out, scales, weights, bias, row_scales, channel_scales)
    for (name, _), tensor in zip(EpiloguesArgs._fields_, given, strict=False):
        setattr(args, name, tensor.data_ptr())
    args.clamp, args.alpha, args.up_offset = form.limit or 0.0, form.alpha, form.up_offset
    args.expert, args.row, args.rows, args.column = EXPERT, row, rows, column
    run(kernel, 1)
    if transposed:
        columns = channel_scales[EXPERT, column : column + tile_columns]
        sums[:rows] *= row_scales[row:, None] * columns
    return out, sums, bias[EXPERT], weights[row:], scales[row:]


TILES = {"whole": (False, 7, 128), "last rows": (False, 0, 83), "few rows": (True, 5, 64), "one row": (True, 3, 1)}
each_tile = pytest.mark.parametrize("tile", TILES)


@each_tile
@pytest.mark.parametrize("column", [0, 512])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "swigluoai", "geglu", "reglu"])
def test_gated_activations(activation: str, biased: bool, column: int, tile: str) -> None:
    (halves, row, rows), form = TILES[tile], Activation.of(activation)
    shape = swiglu_epilogue(form, False, True, biased=biased).shape()
    out, sums, bias, weights, scales = run_epilogue(shape, COLUMNS, halves, row, rows, column, form)
    hidden = sums[:rows] + bias[column : column + TILE_COLUMNS] if biased else sums[:rows]
    hidden = separate_gate_and_up(hidden.T[None])[0].T  # gates and ups take turns
    want = apply_activation(hidden, form) * weights[:, None]
    places = scales[:, column // TILE_COLUMNS]
    torch.testing.assert_close(places, want.abs().amax(1).clamp_min(1e-4) / 448, rtol=1e-5, atol=0)
    got = dequantize_fp8(out[:rows].view(torch.float8_e4m3fn), places[:, None].contiguous())
    assert ((got - want).abs() <= 2**-4 * want.abs() + 2**-9 * want.abs().amax(1, keepdim=True)).all()
    assert scales.isnan().sum() == scales.numel() - rows, "scales of other tiles were written"


@pytest.mark.parametrize("activation", ["swiglu", "swigluoai"])
def test_lost_values_stay_lost(activation: str) -> None:
    """A limit does not make numbers of NaN."""
    (halves, row, rows), form = TILES["whole"], Activation.of(activation)
    shape = swiglu_epilogue(form, False, True, biased=False).shape()
    out, sums, *_ = run_epilogue(shape, COLUMNS, halves, row, rows, 0, form, lost=TILE_COLUMNS // 4)
    lost = separate_gate_and_up(sums.isnan().T[None])[0].T.view(rows, 2, -1).any(1)
    assert lost.any()
    assert torch.equal(out[:rows].view(torch.float8_e4m3fn).float().isnan(), lost)


@each_tile
@pytest.mark.parametrize(("n", "column"), [(COLUMNS, 0), (COLUMNS, 512), (384, 256)])
@pytest.mark.parametrize("biased", [False, True])
def test_bfloat16(biased: bool, n: int, column: int, tile: str) -> None:
    """Half of the last tile may lie past N, where there is no bias."""
    halves, row, rows = TILES[tile]
    out, sums, bias, weights, _ = run_epilogue(Bf16Epilogue(biased=biased).shape(), n, halves, row, rows, column)
    width = min(TILE_COLUMNS, n - column)
    want = sums[:rows, :width]
    if biased:
        want = want + weights[:, None] * bias[column : column + width]
    got = out.view(torch.bfloat16)[:rows, :width]
    # One rounding; the sum may be fused, and then lie on the other side of a tie.
    torch.testing.assert_close(got.float(), want, rtol=2**-8, atol=1e-6)


TRANSPOSED = {"whole": (7, 256), "last rows": (0, 83), "one step": (5, 16), "one row": (3, 1)}
each_transposed = pytest.mark.parametrize("tile", TRANSPOSED)


@each_transposed
@pytest.mark.parametrize("column", [0, 640])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "swigluoai", "geglu", "reglu"])
def test_transposed_activations(activation: str, biased: bool, column: int, tile: str) -> None:
    """In bfloat16, with the scales of rows and channels applied before."""
    (row, rows), form = TRANSPOSED[tile], Activation.of(activation)
    shape = swiglu_epilogue(form, True, True, biased=biased).shape()
    out, sums, bias, weights, _ = run_epilogue(shape, COLUMNS, False, row, rows, column, form, transposed=True)
    hidden = sums[:rows] + bias[column : column + 128] if biased else sums[:rows]
    want = apply_activation(separate_gate_and_up(hidden.T[None])[0].T, form) * weights[:, None]
    got = out.view(torch.bfloat16)[:rows].float()
    torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-5)


@each_transposed
@pytest.mark.parametrize(("n", "column"), [(COLUMNS, 0), (COLUMNS, 640), (128, 0)])
@pytest.mark.parametrize("biased", [False, True])
def test_transposed_bfloat16(biased: bool, n: int, column: int, tile: str) -> None:
    row, rows = TRANSPOSED[tile]
    shape = Bf16Epilogue(biased=biased).shape()
    out, sums, bias, weights, _ = run_epilogue(shape, n, False, row, rows, column, transposed=True)
    want = sums[:rows]
    if biased:
        want = want + weights[:, None] * bias[column : column + 128]
    torch.testing.assert_close(out.view(torch.bfloat16)[:rows].float(), want, rtol=2**-8, atol=1e-5)
