"""Plan: the sizes of an expert-parallel group, frozen, and the sizes that follow from them; the forms of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenloom.errors import InvalidArgument

LAYOUTS = ("token", "expert", "rank", "slots")
ROUTE_LAYOUTS = ("expert", "slots")
"""Layouts with one row per route. The others have one per (token, rank)."""
SCALE_LAYOUTS = ("rows", "columns", "packed")
"""How the FP8 scales of layout "slots" lie; ``Communicator.dispatch`` explains them."""
DISPATCH_STRATEGIES = ("dedup", "all_gather", "all_to_all")
COMBINE_STRATEGIES = ("dedup", "reduce_scatter", "all_to_all", "per_node")
"""Ways to carry a payload, which :class:`tokenloom.Strategy` explains."""
MAX_TOP_K = 32
FP8_BLOCK = 128
"""Values along H that share one FP8 scale."""
RECIPES = ("block", "row")
"""Which values share an FP8 scale: 128 of a row, and 128 x 128 of a weight; or a whole row, and a weight's channel."""

FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""Functions of :class:`Activation`."""


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
                f"num_experts is {self.num_experts}, expected a multiple of the {self.num_ranks} ranks of the group; "
                f"pad the experts to {align_up(self.num_experts, self.num_ranks)}"
            )
        if self.top_k > MAX_TOP_K:
            raise InvalidArgument(f"top_k is {self.top_k}, expected at most {MAX_TOP_K}")

    @property
    def experts_per_rank(self) -> int:
        """Experts on each rank, L = E / W."""
        return self.num_experts // self.num_ranks

    @property
    def scales_per_token(self) -> int:
        """FP8 scales of a row by recipe "block", H / 128. Only valid for hidden sizes that are multiples of 128."""
        return self.hidden // FP8_BLOCK

    def scales_by(self, recipe: str) -> int:
        """Count the FP8 scales of a row by a recipe: ``scales_per_token``, or 1 for a whole row."""
        return 1 if recipe == "row" else self.scales_per_token

    def scale_shape(self, recipe: str) -> tuple[int, ...]:
        """Return what the shape of a row's FP8 scales adds to that of rows: [rows, H / 128], or [rows]."""
        return () if recipe == "row" else (self.hidden // FP8_BLOCK,)

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

    def even_rows(self, alignment: int = 1) -> int:
        """Return the rows of layout "expert" that a rank needs if no rank has more routes than the mean."""
        return padded(self.max_tokens_per_rank * self.top_k, self.experts_per_rank, alignment)


def padded(routes: int, groups: int, alignment: int) -> int:
    """Return the most rows that ``routes`` rows take in ``groups`` groups that are padded to ``alignment`` rows."""
    # Worst case: one route opens a block in each group, then every ``alignment`` routes open another.
    used = min(routes, groups)
    return used * alignment + (routes - used) // alignment * alignment


def align_up(value: int, alignment: int) -> int:
    """Round ``value`` up to a multiple of ``alignment``."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True)
class Activation:
    """What an expert does between its two products.

    Gated, w1 gives a gate and an up for each value, and the activation is ``f(gate) * (up + up_offset)``. Not gated,
    w1 gives one x for each value, and the activation is ``f(x)``. Every ``activation`` argument takes a name instead:

    | name | stands for |
    |---|---|
    | "swiglu", "geglu", "geglu_tanh", "reglu" | gated silu, gelu, gelu_tanh, relu |
    | "silu", "gelu", "gelu_tanh", "relu", "relu2" | the function, not gated |
    | "swigluoai" | gpt_oss: ``Activation("silu", limit=7.0, alpha=1.702, up_offset=1.0)`` |

    Attributes:
        function: f: "silu" is ``x * sigmoid(alpha * x)``, "gelu" the exact one with erf, "gelu_tanh" its
            approximation, "relu2" the square of relu.
        gated: whether there are gates and ups.
        limit: largest gate, and largest absolute up, before anything else. None sets no limit. Where it holds, the
            gradient is 0.
        alpha: factor within the sigmoid of "silu".
        up_offset: added to ups.

    Raises:
        InvalidArgument: the values do not make an activation.
    """

    function: str = "silu"
    gated: bool = True
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.function not in FUNCTIONS:
            raise InvalidArgument(f"function is {self.function!r}, expected one of {', '.join(FUNCTIONS)}")
        if not isinstance(self.gated, bool):
            raise InvalidArgument(f"gated is {self.gated!r}, expected True or False")
        if self.limit is not None and not (is_number(self.limit) and self.limit > 0):
            raise InvalidArgument(f"limit is {self.limit!r}, expected a number above 0, or None")
        for name, value in (("alpha", self.alpha), ("up_offset", self.up_offset)):
            if not is_number(value):
                raise InvalidArgument(f"{name} is {value!r}, expected a number")
        if self.alpha != 1.0 and self.function != "silu":
            raise InvalidArgument(f"alpha is {self.alpha}, which only 'silu' has; function is {self.function!r}")
        if not self.gated and (self.limit is not None or self.up_offset):
            raise InvalidArgument("limit and up_offset are for gates and ups; the activation is not gated")

    @property
    def rows(self) -> int:
        """Rows of w1 for each value of the activation: 2 if gated, else 1."""
        return 1 + self.gated

    @staticmethod
    def of(given: Activation | str) -> Activation:
        """Return the activation that an argument means, by its name or as it is.

        Raises:
            InvalidArgument: it is neither an activation nor the name of one.
        """
        if isinstance(given, Activation):
            return given
        if not isinstance(given, str) or given not in ACTIVATIONS:
            raise InvalidArgument(
                f"activation is {given!r}, expected an Activation or one of {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[given]


def is_number(value: object) -> bool:
    """Whether an option is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


SWIGLU = Activation()
ACTIVATIONS = {
    "swiglu": SWIGLU,
    "geglu": Activation("gelu"),
    "geglu_tanh": Activation("gelu_tanh"),
    "reglu": Activation("relu"),
    **{function: Activation(function, gated=False) for function in FUNCTIONS},
    "swigluoai": Activation("silu", limit=7.0, alpha=1.702, up_offset=1.0),
}
"""Activations by the names that people use."""


@dataclass(frozen=True)
class WeightLayout:
    """How the weights of experts lie in memory. Nothing is copied for it.

    Attributes:
        transposed: w1 is [L, H, 2I] and w2 [L, I, H], instead of [L, 2I, H] and [L, H, I].
        interleaved: gates and ups take turns in the rows of w1 (its columns, if transposed) and in the values of its
            bias, gate first. Otherwise all gates come before all ups.
    """

    transposed: bool = False
    interleaved: bool = False


PLAIN_WEIGHTS = WeightLayout()
