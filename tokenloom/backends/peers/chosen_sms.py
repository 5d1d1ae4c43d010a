"""The SMs that calls of a communicator take, in words."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenloom.backends.peers.buffers import sends_before_opening
from tokenloom.backends.peers.opening import Launcher
from tokenloom.kernels.combine.launch import CombineVariant
from tokenloom.kernels.dispatch.launch import DispatchVariant

Variants = DispatchVariant | CombineVariant


def chosen_sms(launcher: Launcher, are_measured: bool) -> list[str]:
    """Lines for people: SMs of usual calls, how many of them send, and the rates that say so.

    Args:
        are_measured: the launcher's rates are those of this machine.
    """
    rates, num_sms = launcher.rates, launcher.num_sms
    blocks = f"{_of_calls(launcher, launcher.blocks_of)}; num_sms takes fewer"
    origin = "measured here" if are_measured else "of H200, as `tokenloom tune` has kept none here"
    return [
        f"SMs of a kernel: {blocks if num_sms is None else f'{num_sms}, as num_sms says'}",
        f"of these send rows: {_of_calls(launcher, lambda variant: _senders(launcher, variant))}",
        f"rates, {origin}: {rates}",
    ]


def _senders(launcher: Launcher, variant: Variants) -> int | str:
    if variant.work(launcher.rates) is None:
        return "all"
    if isinstance(variant, DispatchVariant) and variant.layout == "token":  # they do nothing else
        return "all"
    return variant.sending_blocks(launcher.blocks_of(variant), launcher.rates)


def _of_calls(launcher: Launcher, number: Callable[[Variants], int | str]) -> str:
    plan, bf16 = launcher.plan, torch.bfloat16
    few, words = sends_before_opening(plan), []
    for layout in ("token", "expert"):
        staged = few and layout == "expert"
        rows, fp8_rows = (
            number(DispatchVariant(plan, layout=layout, x_dtype=dtype, staged=staged))
            for dtype in (bf16, torch.float8_e4m3fn)
        )
        home = number(CombineVariant(plan, layout=layout, y_dtype=bf16, wire_dtype=bf16, out_dtype=bf16, eager=few))
        words.append(f"by {layout} {rows} of a dispatch ({fp8_rows} of FP8) and {home} of a combine")
    return ", ".join(words)
