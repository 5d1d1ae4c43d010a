"""Plan: the sizes of an expert-parallel group, frozen, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom.errors import InvalidArgument

LAYOUTS = ("token", "expert", "rank", "slots")
ROUTE_LAYOUTS = ("expert", "slots")
"""Layouts with one row per route. The others have one per (token, rank)."""
SCALE_LAYOUTS = ("rows", "columns", "packed")
"""How the FP8 scales of layout "slots" lie; ``Communicator.dispatch`` explains them."""
DISPATCH_STRATEGIES = ("dedup", "all_gather", "all_to_all")
COMBINE_STRATEGIES = ("dedup", "reduce_scatter", "all_to_all")
"""Ways to carry a payload, which :class:`tokenloom.Strategy` explains."""
MAX_TOP_K = 32
FP8_BLOCK = 128
"""Values along H that share one FP8 scale."""


@dataclass(frozen=True)
class Plan:
    """Sizes that all ranks of a group must agree on.

    Attributes:
        num_ranks: W, ranks in the expert-parallel group.
        num_experts: E, experts in the layer. Expert e lives on rank ``e // experts_per_rank``.
        hidden: H, values in a token.
        top_k: K, experts per token, at most 32.
        max_tokens_per_rank: M, the most tokens a rank may pass to one dispatch.

    Raises:
        InvalidArgument: a size is not a positive integer, E is not divisible by W, K is over 32.
    """

    num_ranks: int
    num_experts: int
    hidden: int
    top_k: int
    max_tokens_per_rank: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name} is {value!r}, expected a positive integer")
        if self.num_experts % self.num_ranks:
            raise InvalidArgument(
                f"num_experts is {self.num_experts}, not divisible by the {self.num_ranks} ranks of the group; "
                "pad the experts or use a group whose size divides them"
            )
        if self.top_k > MAX_TOP_K:
            raise InvalidArgument(f"top_k is {self.top_k}, expected at most {MAX_TOP_K}")

    @property
    def experts_per_rank(self) -> int:
        """Experts on each rank, L = E / W."""
        return self.num_experts // self.num_ranks

    @property
    def scales_per_token(self) -> int:
        """FP8 scales of a row, H / 128. Only valid for hidden sizes that are multiples of 128."""
        return self.hidden // FP8_BLOCK

    @property
    def default_slots(self) -> int:
        """Default S of layout "slots": room for all tokens of all ranks, W * M, each naming the expert once."""
        return self.num_ranks * self.max_tokens_per_rank

    def worst_case_rows(self, layout: str, alignment: int = 1) -> int:
        """Return the most rows that a rank can receive, which is when all tokens of all ranks go to it."""
        tokens = self.num_ranks * self.max_tokens_per_rank
        if layout not in ROUTE_LAYOUTS:
            return tokens
        return padded(tokens * self.top_k, self.experts_per_rank, alignment)


def padded(routes: int, groups: int, alignment: int) -> int:
    """Return the most rows that ``routes`` rows take in ``groups`` groups that are padded to ``alignment`` rows."""
    # Worst case: one route opens a block in each group, then every ``alignment`` routes open another.
    used = min(routes, groups)
    return used * alignment + (routes - used) // alignment * alignment


def align_up(value: int, alignment: int) -> int:
    """Round ``value`` up to a multiple of ``alignment``."""
    return -(-value // alignment) * alignment
