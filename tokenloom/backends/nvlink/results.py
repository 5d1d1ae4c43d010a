"""What a dispatch leaves beside its rows: where it lies in memory, and the tensors made of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from tokenloom.backends.seam import DispatchOptions, DispatchOut, RoutedCounts
from tokenloom.kernels.dispatch.launch import RESULTS
from tokenloom.plan import FP8_BLOCK, Plan, align_up

ALIGNED_WORDS = 32
"""Parts of results begin at multiples of 128 bytes, but for counts, which lie side by side."""
WORDS_TOGETHER = 2**18
"""Words that are allocated for several calls."""
MOST_WORDS_TOGETHER = WORDS_TOGETHER // 4
"""Words of a call for which memory is not shared with others."""
COUNTS = ("num_rows", "source_counts", "expert_counts", "expert_offsets")


class Results:
    """What a dispatch of one kind leaves in one int32 tensor: counts, what each source counted, slots, and more.

    Args:
        plan: sizes. rank: of this process.
        options: of the dispatch.
        sizes: words of further parts, by name.
        num_places: rows of the output.
        with_weights, with_scales: rows come with them.

    Attributes:
        starts: first word of each part, by name. "slots" is the last one. at: first byte.
        argument_offsets: first bytes of the parts that kernels get as arguments, in the order of RESULTS.
        fixed_words: words of all but slots. slots_per_token: words of slots, by token.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        options: DispatchOptions,
        num_places: int,
        sizes: Mapping[str, int],
        *,
        with_weights: bool,
        with_scales: bool,
    ) -> None:
        self.plan, self.rank, self.options, self.num_places = plan, rank, options, num_places
        self.with_weights, self.with_scales = with_weights, with_scales
        num_ranks, local = plan.num_ranks, plan.experts_per_rank
        counts = dict(zip(COUNTS, (1, num_ranks, local, local + 1), strict=True))
        more = {"all_counts": num_ranks * (num_ranks + plan.num_experts), "epoch": 2, **sizes}
        self.starts: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        end = 0
        for name, size in (counts | more).items():
            start = end if name in counts else align_up(end, ALIGNED_WORDS)
            end = start + size
            self.starts[name], self._ends[name] = start, end
        self.starts["slots"] = self.fixed_words = align_up(end, ALIGNED_WORDS)
        self.at = {name: 4 * start for name, start in self.starts.items()}
        self.argument_offsets = [self.at[name] for name in RESULTS]
        self.slots_per_token = num_ranks + plan.top_k

    def words(self, num_tokens: int) -> int:
        """Words that a dispatch of so many tokens leaves."""
        return self.fixed_words + num_tokens * self.slots_per_token

    def part(self, memory: torch.Tensor, first: int, name: str) -> torch.Tensor:
        """A part, as int32 in one dimension, of the words of a call that begin in memory at ``first``."""
        end = self._ends.get(name)
        # Without the version that autograd counts: calls that share the memory are not changed with each other.
        return memory.data[first + self.starts[name] : None if end is None else first + end]

    def count(self, memory: torch.Tensor, first: int, name: str) -> torch.Tensor | None:
        """One of the sizes of the output, as it lies on the device; None if the layout has none such."""
        if name == "num_rows":
            return memory.data[first + self.starts[name]]
        if self.options.layout != {"expert_offsets": "expert", "slot_ranges": "slots"}.get(name, self.options.layout):
            return None
        found = self.part(memory, first, name)
        return found.view(self.plan.experts_per_rank, -1, 2) if name == "slot_ranges" else found

    def scales(self, found: torch.Tensor) -> torch.Tensor:
        """Scales as they are handed out, from their part: [places, H / 128], in layout "slots" by ``scale_layout``."""
        blocks, local = self.plan.hidden // FP8_BLOCK, self.plan.experts_per_rank
        if self.options.scale_layout == "packed":
            return found.view(local, -(-blocks // 4), -1).transpose(1, 2)
        found = found.view(torch.float32)
        if self.options.scale_layout == "columns":
            return found.view(local, blocks, -1).transpose(1, 2)
        return found.view(*([local, -1] if self.options.layout == "slots" else [self.num_places]), blocks)


class ResultsMemory:
    """Memory for what dispatches leave: one allocation serves many calls of a stream, since each takes the host long.

    Args:
        device: of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: int | None = None
        self._begin = self._end = 0
        self.memory = torch.empty(0, dtype=torch.int32, device=device)
        self.address = 0

    def take(self, results: Results, num_tokens: int, stream: int | None) -> tuple[torch.Tensor, int, int]:
        """Memory for one call: a tensor, the first word in it that is the call's own, and the address of that.

        Args:
            results: what the call leaves. num_tokens: of the call.
            stream: handle of the current stream, whose memory it is. None: memory that no other call has.
        """
        begin, num_words = self._begin, results.fixed_words + num_tokens * results.slots_per_token
        end = begin + num_words
        if stream == self._stream and end <= self._end:
            self._begin = end + ALIGNED_WORDS - 1 & -ALIGNED_WORDS
            return self.memory, begin, self.address + 4 * begin
        if stream is None or num_words > MOST_WORDS_TOGETHER:
            own = torch.empty(num_words, dtype=torch.int32, device=self._device)
            return own, 0, own.data_ptr()
        self.memory = torch.empty(WORDS_TOGETHER, dtype=torch.int32, device=self._device)
        self.address, self._stream = self.memory.data_ptr(), stream
        self._begin, self._end = 0, WORDS_TOGETHER
        return self.take(results, num_tokens, stream)


class CountsInWords(RoutedCounts):
    """Counts of a dispatch. Tensors are made when somebody asks for them.

    Args:
        results, memory, first: what lies where, see :meth:`Results.count`.
        given: the caller's tensors that hold some of them.
    """

    _where: tuple[Results, torch.Tensor, int]
    _given: DispatchOut | None

    def __init__(self, results: Results, memory: torch.Tensor, first: int, given: DispatchOut | None) -> None:
        vars(self)["_where"], vars(self)["_given"] = (results, memory, first), given

    def __getattr__(self, name: str) -> Any:
        if name not in RoutedCounts.__dataclass_fields__:
            raise AttributeError(name)
        found = None if self._given is None else getattr(self._given, name)
        if found is None:
            results, memory, first = self._where
            found = results.count(memory, first, name)
        vars(self)[name] = found
        return found

    slot_ranges = cached_property(lambda self: self.__getattr__("slot_ranges"))
