"""Staged dispatches: rows arrive by source, and go from there to their places on this rank.

All dispatches in layout "slots" are staged, and bounded ones in layout "expert" of small plans. Outputs are ordinary
tensors, the caller's own where it gives some.
"""

from __future__ import annotations

import torch

from tokenloom.backends.nvlink.buffers import is_eager, require_aligned
from tokenloom.backends.nvlink.handle import NvlinkHandle
from tokenloom.backends.nvlink.launcher import Half
from tokenloom.backends.nvlink.prepared import PreparedDispatch, SentDispatch, Shared
from tokenloom.backends.nvlink.results import COUNTS, Results
from tokenloom.backends.seam import DispatchKind, DispatchOptions, DispatchOut, Tokens
from tokenloom.kernels.dispatch.launch import OUTPUTS
from tokenloom.plan import FP8_BLOCK

PARTS_OF_A_ROW = ("rows", "row_scales", "row_ids", "row_weights", "row_places", "row_tokens")
"""What arrives, as a region and the kernel's arguments name it."""
WRITTEN_ALONE = frozenset((*COUNTS, "slot_ranges"))
"""Results that the kernel's arguments name as the caller does."""
OUTPUT_WORDS = {
    "out_scales": "scales",
    "out_ids": "local_ids",
    "out_weights": "weights",
    "out_places": "row_places",
    "out_tokens": "row_tokens",
    "slot_ranges": "slot_ranges",
}
"""Parts of results that outputs other than rows are, by the names of arguments."""


class StagedDispatch(PreparedDispatch):
    """Staged dispatches of one kind."""

    def __init__(
        self, shared: Shared, kind: DispatchKind, repeats: bool = False, meant: DispatchOptions | None = None
    ) -> None:
        super().__init__(shared, kind, repeats, meant)
        options = kind.options
        plan, layout, eager = shared.plan, options.layout, is_eager(shared.plan)
        rows = plan.worst_case_rows("token") if options.capacity is None else options.capacity
        self._places = plan.experts_per_rank * rows if layout == "slots" else rows
        self._further = self.further_words()
        self._with_scales = kind.brings_scales
        results = self._layout_of_results(self._with_scales)
        self.prepare_kernels(results, rows, staged=True, eager=eager)
        self._without_scales = self._layout_of_results(False) if self._with_scales else results
        at = self.results.at
        self._outputs = [at.get(OUTPUT_WORDS[name], 0) for name in OUTPUTS[1:]]
        self._like = torch.empty(0, dtype=kind.row_dtype, device=self.device)
        # Last: it may make memory, which all ranks then do.
        self._buffer = shared.buffers.staged(kind.row_dtype, self.call_kind.fields_of(self.launcher.num_calls))
        args, regions = self.kernel.args, self._buffer.layout
        args.peers = self._buffer.peers.data_ptr()
        for name in PARTS_OF_A_ROW:
            setattr(args, name, regions.offset(f"{name}0"))
        args.turns, args.turn_bytes = shared.buffers.turns, regions.offset("rows1") - regions.offset("rows0")
        args.stop_on_overflow, args.host_counts = False, 0

    def _layout_of_results(self, with_scales: bool) -> Results:
        """All but rows lies in one tensor; scales, which are large, last, unless the caller gives room for them."""
        plan, options, rank = self.shared.plan, self.options, self.launcher.ranks.rank
        received = plan.worst_case_rows("rank")
        sizes = {"slot_ranges": 2 * plan.num_experts, "row_tokens": received}
        if options.layout == "token":  # what belongs to a place may be handed out up to the caller's capacity
            received = max(received, self._places)
        sizes |= {"local_ids": received * plan.top_k, "row_places": received * plan.top_k, **self._further}
        if self.with_weights:
            sizes["weights"] = received * plan.top_k
        if with_scales:
            blocks = plan.hidden // FP8_BLOCK
            sizes["scales"] = self._places * (-(-blocks // 4) if options.scale_layout == "packed" else blocks)
        brought = {"with_weights": self.with_weights, "with_scales": self._with_scales}
        return Results(plan, rank, options, self._places, sizes, **brought)

    def further_words(self) -> dict[str, int]:
        """Words that calls leave besides, by the names of arguments and results."""
        return {}

    def set_all_arguments(
        self, tokens: Tokens, results: Results, base: int, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the arguments of one call, whose words lie at ``base``, and whose rows go to the address ``rows``.

        Returns:
            x and topk_ids, or copies of them at addresses that the kernel takes.
        """
        for name in self._further:
            setattr(self.kernel.args, name, base + results.at[name])
        out_scales, out_ids, out_weights, out_places, out_tokens, slot_ranges = self._outputs
        return self.set_arguments(
            tokens,
            results,
            base,
            0,
            rows,
            base + out_scales if self._with_scales else 0,
            base + out_ids,
            base + out_weights if self.with_weights else 0,
            base + out_places,
            base + out_tokens,
            base + slot_ranges,
        )

    def launch(
        self, tokens: Tokens, out: DispatchOut | None = None, stream: int | None = None
    ) -> tuple[NvlinkHandle, torch.Tensor, Half | None]:
        launcher, num_places = self.launcher, self._places
        if out is None or out.tokens is None:
            rows = self._like.new_empty(num_places, self.shared.plan.hidden)
        else:
            require_aligned(out.tokens, "out.tokens")
            rows = out.tokens
        results = self.results if out is None or out.scales is None else self._without_scales
        num_tokens = tokens.x.shape[0]
        memory = self.shared.memory.take(results, num_tokens, stream)
        base = memory[2]
        _, topk_ids = self.set_all_arguments(tokens, results, base, rows.data_ptr())
        if out is not None:
            self._write_to(out)
        call, half = launcher.num_calls, None
        if stream is None:
            half = self.half(memory, (rows, out))
            launcher.launch(self.kernel, self.call_kind, call, repeats=self.repeats, begins=half)
        else:
            launcher.launch_ready(self.kernel, self.call_kind, call, stream, repeats=self.repeats)
        handle = NvlinkHandle(self.options, call, num_tokens, num_places, topk_ids, memory, results, None, None)
        row_places, row_tokens = base + self._outputs[3], base + self._outputs[4]
        slots, all_counts = results.argument_offsets[:2]
        if launcher.masked:
            handle.masked = launcher.masked
        handle.pointers = (row_places, row_tokens, base + slots, base + all_counts)
        if out is not None:
            handle.hold_given(out)
        return handle, rows, half

    def finish(self, sent: SentDispatch) -> tuple[NvlinkHandle, torch.Tensor]:
        handle = sent.handle
        if self.shared.checked:
            self.shared.settle_checked(handle.number)
        if sent.out is not None:
            handle.write_ids(sent.out)
        return handle, sent.rows

    def _write_to(self, out: DispatchOut) -> None:
        """Let the kernel write to the caller's tensors. Ids of another dtype are converted when they are there."""
        args = self.kernel.args
        for name, tensor in vars(out).items():
            if tensor is not None and name in WRITTEN_ALONE:
                setattr(args, name, tensor.data_ptr())
        if out.topk_ids is not None and out.topk_ids.dtype == torch.int32:
            args.out_ids = out.topk_ids.data_ptr()
        if out.topk_weights is not None and self.with_weights:
            args.out_weights = out.topk_weights.data_ptr()
        if out.scales is not None:
            args.out_scales = out.scales.data_ptr()
