"""Meaning of every operation: all ranks in one process, in plain torch, by sorting and looping over routes.

Backends must return the results of dispatch and combine bit for bit. So this module is obviously right rather than
fast, and shares no ordering or arithmetic with them. Lists have one entry per rank. Results are on the CPU.

``moe`` and ``fused_layer`` also multiply, and the order of the sums in a product is free.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from tokenloom.errors import CapacityOverflow, InvalidArgument
from tokenloom.plan import FP8_BLOCK, PLAIN_WEIGHTS, RECIPES, SWIGLU, Activation, Plan, WeightLayout, align_up

__all__ = [
    "Routed",
    "combine",
    "combine_weights",
    "dispatch",
    "fused_layer",
    "moe",
    "place",
    "quantize_fp8",
    "split",
    "sum_slots",
]

Key = tuple[int, int] | tuple[int, int, int]
"""(source rank, token), or (source rank, token, k) in layouts "expert" and "slots", that a row belongs to."""


@dataclass(frozen=True)
class Routed:
    """Result of a dispatch on one rank: the fields of ``tokenloom.Routed``, and the places of all rows.

    Attributes:
        tokens: as in ``tokenloom.Routed``.
        scales: as in ``tokenloom.Routed``.
        topk_ids: int64, otherwise as in ``tokenloom.Routed``.
        topk_weights: as in ``tokenloom.Routed``.
        expert_offsets: list [L + 1] in layout "expert", else None.
        expert_counts: list [L].
        slot_ranges: list [L] of lists [W] of (first place, number of places) in layout "slots", else None.
        source_counts: list [W].
        num_rows: rows in use.
        rows: place of each (source rank, token), or (source rank, token, k), that has one. Rows that a bounded
            capacity dropped are missing.
        padding: places of the output that hold no row, ascending.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    topk_ids: torch.Tensor | None
    topk_weights: torch.Tensor | None
    expert_offsets: list[int] | None
    expert_counts: list[int]
    slot_ranges: list[list[tuple[int, int]]] | None
    source_counts: list[int]
    num_rows: int
    rows: dict[Key, int]
    padding: list[int]


def place(
    plan: Plan,
    topk_ids: Sequence[torch.Tensor],
    table: Sequence[Sequence[int]],
    masked: Collection[int] = (),
) -> tuple[Plan, list[torch.Tensor]]:
    """Give each route a physical slot. The other functions take the results for a plan and its ids.

    Args:
        plan: sizes of the group.
        topk_ids: [T, K] of each rank, experts.
        table: for each rank, the expert in each of its slots, -1 for an empty one.
        masked: ranks whose slots count for nothing.

    Returns:
        The plan whose experts are all slots of all ranks; and int64 [T, K] of each rank, rank * slots of a rank +
        slot, -1 where the expert has no slot.
    """
    slots_per_rank = len(table[0])
    placed = []
    for source, ids in enumerate(topk_ids):
        slot_ids = torch.full(ids.shape, -1, dtype=torch.int64, device="cpu")
        for e in range(plan.num_experts):
            slots = []
            for rank, experts in enumerate(table):
                if rank not in masked:
                    slots += [rank * slots_per_rank + slot for slot, expert in enumerate(experts) if expert == e]
            index = source
            for token, experts_of_token in enumerate(ids.tolist()):
                for k, expert in enumerate(experts_of_token):
                    if expert == e and slots:
                        slot_ids[token, k] = slots[index % len(slots)]
                        index += 1
        placed.append(slot_ids)
    return replace(plan, num_experts=plan.num_ranks * slots_per_rank), placed


def split(
    plan: Plan,
    slot_ids: Sequence[torch.Tensor],
    table: Sequence[Sequence[int]],
    masked: Collection[int] = (),
    *,
    rows_per_pull: int = 0,
    always: bool = False,
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Let other ranks compute routes of overloaded ones, as ``balance="batch"`` does, route by route.

    A rank is overloaded if it has more routes than the mean, rounded up. The fullest rank, whichever it is by then,
    fills the emptiest one, which gets nothing more after that. It gives the last route first, of the slot that is
    fullest, and of the next one where that is empty. The other rank takes an empty slot for an expert that it lacks,
    and no more routes where it has none left. It gets no more routes than overloaded ranks have too many.

    Args:
        plan: sizes, and slot_ids: slots of all routes, as ``place`` returns them.
        table: for each rank, the expert in each of its slots, -1 for an empty one.
        masked: ranks that take no part.
        rows_per_pull: the split counts for nothing unless the fullest rank loses so many routes for each expert that a
            rank takes an empty slot for, or that others take one for of what it gave, whichever are more.
        always: it counts in any case.

    Returns:
        Slots [T, K] of each rank, and the table of the batch.
    """
    per_rank, ranks = len(table[0]), range(plan.num_ranks)
    routes: list[list[tuple[int, int, int]]] = [[] for _ in range(plan.num_ranks * per_rank)]
    for source, ids in enumerate(slot_ids):
        for token, slots in enumerate(ids.tolist()):
            for k, slot in enumerate(slots):
                if slot >= 0:
                    routes[slot].append((source, token, k))

    def load(rank: int) -> int:
        return sum(len(each) for each in routes[rank * per_rank : (rank + 1) * per_rank])

    loads = [load(rank) for rank in ranks]
    mean = math.ceil(sum(loads) / (plan.num_ranks - len(masked)))
    helpers = {rank for rank in ranks if rank not in masked}
    batch = [list(experts) for experts in table]
    pulled, sent = [0] * plan.num_ranks, [0] * plan.num_ranks
    while helpers:
        surplus = sum(max(0, load(rank) - mean) for rank in ranks)
        giver, helper = max(ranks, key=load), min(sorted(helpers), key=load)
        helpers.remove(helper)
        wanted = min(mean - load(helper), surplus)
        while wanted > 0:
            slot = max(range(giver * per_rank, (giver + 1) * per_rank), key=lambda slot: len(routes[slot]))
            expert = table[giver][slot % per_rank]
            if expert not in batch[helper]:
                if -1 not in batch[helper]:
                    break
                batch[helper][batch[helper].index(-1)] = expert
                pulled[helper] += 1
                sent[giver] += 1
            target = routes[helper * per_rank + batch[helper].index(expert)]
            while wanted > 0 and routes[slot]:
                target.append(routes[slot].pop())
                wanted -= 1
    gain = max(loads) - max(load(rank) for rank in ranks)
    if not (always or gain >= max(1, rows_per_pull * max(*pulled, *sent))):
        return list(slot_ids), [list(experts) for experts in table]
    placed = [torch.full_like(ids, -1) for ids in slot_ids]
    for slot, its in enumerate(routes):
        for source, token, k in its:
            placed[source][token, k] = slot
    return placed, batch


def sum_slots(gradients: Sequence[torch.Tensor], table: Sequence[Sequence[int]], num_experts: int) -> torch.Tensor:
    """Sum the gradients of each expert's slots in float32 (float64 for float64), in ascending (rank, slot).

    Args:
        gradients: [slots of a rank, ...] of each rank.
        table: for each rank, the expert in each of its slots, -1 for an empty one.
        num_experts: E.

    Returns:
        [E, ...] in the dtype of the sums. A sum starts from its first term.
    """
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    sums: list[torch.Tensor | None] = [None] * num_experts
    for rows, experts in zip(gradients, table, strict=True):
        for row, expert in zip(rows.to(wide), experts, strict=True):
            if expert >= 0:
                before = sums[expert]
                sums[expert] = row if before is None else before + row
    return torch.stack([each for each in sums if each is not None])


def dispatch(
    plan: Plan,
    xs: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor] | None,
    layout: str,
    *,
    alignment: int = 1,
    scales: Sequence[torch.Tensor] | None = None,
    capacity: int | None = None,
    bounded: bool = False,
    to_fp8: bool = False,
    power_of_two_scales: bool = False,
    scale_layout: str = "rows",
    recipe: str = "block",
) -> list[Routed]:
    """Dispatch the tokens of all ranks.

    Args:
        plan: sizes of the group.
        xs: [T, H] of each rank.
        topk_ids: int32 or int64 [T, K] of each rank, -1 for an unused place.
        topk_weights: [T, K] of each rank, or None.
        layout: as in ``Communicator.dispatch``.
        alignment: as in ``Communicator.dispatch``.
        scales: float32 [T, H / 128] or [T] of each rank for FP8, or packed int32 [T, n], else None.
        capacity: as in ``Communicator.dispatch``.
        bounded: give outputs ``capacity`` rows and drop what does not fit. Layouts "rank" and "slots" always have
            their fixed places.
        to_fp8: as in ``Communicator.dispatch``.
        power_of_two_scales: as in ``Communicator.dispatch``.
        scale_layout: as in ``Communicator.dispatch``.
        recipe: as in ``Communicator.dispatch``, with ``to_fp8``. Scales that are given show it.

    Returns:
        Result of each rank.

    Raises:
        CapacityOverflow: sizes are exact, and some rank needs more rows than ``capacity``.
    """
    if to_fp8:
        quantised = [quantize_fp8(x, power_of_two_scales=power_of_two_scales, recipe=recipe) for x in xs]
        xs, scales = [q for q, _ in quantised], [each for _, each in quantised]
    ids = [rank_ids.tolist() for rank_ids in topk_ids]
    all_keys = [_keys_in_order(plan, ids, rank, layout) for rank in range(plan.num_ranks)]
    slots = plan.default_slots if capacity is None else capacity
    all_rows = [_places(plan, ids, rank, keys, layout, alignment, slots) for rank, keys in enumerate(all_keys)]
    needed = max(num_rows for _, num_rows in all_rows)
    if capacity is not None and not bounded and layout != "slots" and needed > capacity:
        raise CapacityOverflow(needed, capacity, sent=False)
    routed = []
    for rank, (rows, num_rows) in enumerate(all_rows):
        if layout == "rank":
            num_places = plan.num_ranks * plan.max_tokens_per_rank
        elif layout == "slots":
            num_places = plan.experts_per_rank * slots
        else:
            num_places = capacity if bounded and capacity is not None else num_rows
        kept = {key: place for key, place in rows.items() if place < num_places}
        routed.append(
            _fill(
                plan,
                rank,
                xs,
                scales,
                ids,
                topk_weights,
                layout,
                alignment,
                kept,
                min(num_rows, num_places),
                num_places,
                scale_layout,
            )
        )
    return routed


def _keys_in_order(plan: Plan, ids: list[list[list[int]]], rank: int, layout: str) -> list[Key]:
    """List the keys of the rows that a rank receives, in the order of the layout."""
    routes = [
        (expert % plan.experts_per_rank, source, token, k)
        for source, tokens in enumerate(ids)
        for token, experts in enumerate(tokens)
        for k, expert in enumerate(experts)
        if expert >= 0 and expert // plan.experts_per_rank == rank
    ]
    if layout in ("expert", "slots"):
        return [(source, token, k) for _, source, token, k in sorted(routes)]
    return sorted({(source, token) for _, source, token, _ in routes})


def _places(
    plan: Plan, ids: list[list[list[int]]], rank: int, keys: list[Key], layout: str, alignment: int, slots: int
) -> tuple[dict[Key, int], int]:
    """Find the place of every key, and the number of rows that the output needs.

    In layout "slots" keys beyond the ``slots`` of their expert have no place, and the number is that of the others.
    """
    if layout == "token":
        return {key: place for place, key in enumerate(keys)}, len(keys)
    if layout == "rank":
        seen = [0] * plan.num_ranks
        places = {}
        for key in keys:
            places[key] = key[0] * plan.max_tokens_per_rank + seen[key[0]]
            seen[key[0]] += 1
        return places, len(keys)
    places, start = {}, 0
    for expert in range(rank * plan.experts_per_rank, (rank + 1) * plan.experts_per_rank):
        group = [key for key in keys if ids[key[0]][key[1]][key[-1]] == expert]
        if layout == "slots":
            places |= {key: expert % plan.experts_per_rank * slots + i for i, key in enumerate(group) if i < slots}
            continue
        places |= {key: start + i for i, key in enumerate(group)}
        start += align_up(len(group), alignment)
    return places, len(places) if layout == "slots" else start


def _fill(
    plan: Plan,
    rank: int,
    xs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None,
    ids: list[list[list[int]]],
    topk_weights: Sequence[torch.Tensor] | None,
    layout: str,
    alignment: int,
    rows: dict[Key, int],
    num_rows: int,
    num_places: int,
    scale_layout: str,
) -> Routed:
    local = range(rank * plan.experts_per_rank, (rank + 1) * plan.experts_per_rank)
    tokens = torch.zeros(num_places, plan.hidden, dtype=torch.float32, device="cpu").to(xs[0].dtype)
    out_scales = None
    if scales is not None:
        out_scales = torch.zeros(num_places, *scales[0].shape[1:], dtype=scales[0].dtype, device="cpu")
    out_ids = torch.full((num_places, plan.top_k), -1, dtype=torch.int64, device="cpu")
    out_weights = None
    if topk_weights is not None:
        out_weights = torch.zeros(num_places, plan.top_k, dtype=topk_weights[0].dtype, device="cpu")
    for (source, token, *_), place in rows.items():
        _copy_row(tokens, place, xs[source], token)
        if out_scales is not None and scales is not None:
            out_scales[place] = scales[source][token]
        for k, expert in enumerate(ids[source][token]):
            if expert in local:
                out_ids[place, k] = expert - local.start
                if out_weights is not None and topk_weights is not None:
                    out_weights[place, k] = topk_weights[source][token, k]
    by_token = layout in ("token", "rank")
    expert_counts, offsets = _expert_counts(plan, ids, local, layout, alignment, num_places)
    shape = {
        "rank": (plan.num_ranks, plan.max_tokens_per_rank),
        "slots": (plan.experts_per_rank, num_places // plan.experts_per_rank),
    }.get(layout, (num_places,))
    # Where rows are routes, a received token counts for its source even if some of its routes were dropped.
    kept = list(rows) if by_token else _keys_in_order(plan, ids, rank, "token")
    if out_scales is not None:
        out_scales = out_scales.view(*shape, *out_scales.shape[1:])
        out_scales = _laid_out(out_scales, scale_layout) if layout == "slots" else out_scales
    return Routed(
        tokens=tokens.view(*shape, plan.hidden),
        scales=out_scales,
        topk_ids=out_ids.view(*shape, plan.top_k) if by_token else None,
        topk_weights=out_weights.view(*shape, plan.top_k) if by_token and out_weights is not None else None,
        expert_offsets=offsets if layout == "expert" else None,
        expert_counts=expert_counts,
        slot_ranges=_slot_ranges(plan, ids, local, num_places) if layout == "slots" else None,
        source_counts=[sum(key[0] == source for key in kept) for source in range(plan.num_ranks)],
        num_rows=num_rows,
        rows=rows,
        padding=sorted(set(range(num_places)) - set(rows.values())),
    )


def _expert_counts(
    plan: Plan, ids: list[list[list[int]]], local: range, layout: str, alignment: int, num_places: int
) -> tuple[list[int], list[int]]:
    """Count the routes of each local expert and find padded starts. In layouts of routes they fit the output."""
    flat = [expert for tokens in ids for experts in tokens for expert in experts]
    counts = [flat.count(expert) for expert in local]
    if layout == "slots":
        return [min(count, num_places // len(local)) for count in counts], []
    if layout != "expert":
        return counts, []
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + align_up(count, alignment))
    offsets = [min(start, num_places) for start in starts]
    return [min(count, offsets[e + 1] - offsets[e]) for e, count in enumerate(counts)], offsets


def _slot_ranges(plan: Plan, ids: list[list[list[int]]], local: range, num_places: int) -> list[list[tuple[int, int]]]:
    """Find which places of each local expert each source fills, as (first place, number)."""
    slots = num_places // plan.experts_per_rank
    ranges = []
    for expert in local:
        # For each place, taken or dropped, the source that it belongs to.
        sources = [s for s, tokens in enumerate(ids) for experts in tokens for each in experts if each == expert]
        taken = sources[:slots]
        firsts = [min(slots, sum(source < rank for source in sources)) for rank in range(plan.num_ranks)]
        ranges.append([(first, taken.count(rank)) for rank, first in enumerate(firsts)])
    return ranges


def _laid_out(scales: torch.Tensor, scale_layout: str) -> torch.Tensor:
    """Give scales [L, S, n] the layout that ``Communicator.dispatch`` describes. "rows" leaves [L, S] as well."""
    if scale_layout == "rows":
        return scales
    local, slots, blocks = scales.shape
    if scale_layout == "columns":
        out = torch.empty(local * blocks * slots, dtype=torch.float32, device="cpu")
        out = out.as_strided((local, slots, blocks), (slots * blocks, 1, slots))
        out.copy_(scales)
        return out
    words = -(-blocks // 4)
    packed = torch.zeros(local * words * slots, dtype=torch.int64, device="cpu")
    packed = packed.as_strided((local, slots, words), (slots * words, 1, slots))
    for expert, slot, block in product(range(local), range(slots), range(blocks)):
        scale = scales[expert, slot, block].item()
        if scale:
            mantissa, exponent = math.frexp(scale)  # the mantissa of a power of two is a half
            assert mantissa == 0.5, "only powers of two can be packed"
            packed[expert, slot, block // 4] += (exponent - 1 + 127) << (8 * (block % 4))
    out = torch.zeros(local * words * slots, dtype=torch.int32, device="cpu")
    out = out.as_strided(packed.shape, packed.stride())
    out.copy_(torch.where(packed < 2**31, packed, packed - 2**32))
    return out


def _copy_row(out: torch.Tensor, place: int, rows: torch.Tensor, row: int) -> None:
    out.view(torch.uint8)[place] = rows.view(torch.uint8)[row]  # bytes: FP8 rows cannot be assigned


def combine(
    plan: Plan,
    ys: Sequence[torch.Tensor],
    routed: Sequence[Routed],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor] | None,
    *,
    mode: str = "per_rank",
    wire_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    biases: Sequence[Sequence[torch.Tensor]] = (),
    nodes: Sequence[Sequence[int]] | None = None,
) -> list[torch.Tensor]:
    """Combine the rows of all ranks.

    Args:
        plan: sizes of the group.
        ys: rows of each rank, with the shape of its ``routed.tokens``.
        routed: result of ``dispatch``.
        topk_ids: [T, K] of each rank, as given to ``dispatch``.
        topk_weights: [T, K] of each rank, factors of the rows of layout "expert", or None for ones.
        mode: order of the sums, "per_rank", "per_route" or "per_node".
        wire_dtype: as in ``Communicator.combine``.
        out_dtype: as in ``Communicator.combine``.
        biases: for each rank, the tensors [T, H] that are added to its result in their order.
        nodes: the ranks of each node, for "per_node". None: all ranks are on one.

    Returns:
        [T, H] of each rank.
    """
    nodes = [range(plan.num_ranks)] if nodes is None else nodes
    y_dtype = ys[0].dtype
    compute = torch.float64 if y_dtype == torch.float64 else torch.float32
    wire_dtype, out_dtype = wire_dtype or y_dtype, out_dtype or y_dtype
    outs = []
    for source, ids in enumerate(topk_ids):
        out = torch.zeros(ids.shape[0], plan.hidden, dtype=out_dtype, device="cpu")
        for token, experts in enumerate(ids.tolist()):
            terms = []  # what comes home for this token, in the order of the sum
            for rank in range(plan.num_ranks):
                ks = [k for k, expert in enumerate(experts) if expert >= 0 and expert // plan.experts_per_rank == rank]
                rows = ys[rank].reshape(-1, plan.hidden)
                if ks and (source, token) in routed[rank].rows:
                    partial = [(ks[0], rows[routed[rank].rows[source, token]].to(compute))]
                else:
                    partial = []
                    for k in ks:
                        place = routed[rank].rows.get((source, token, k))
                        term = torch.full((plan.hidden,), torch.nan, dtype=compute, device="cpu")
                        if place is not None:
                            term = rows[place].to(compute)
                        if topk_weights is not None:
                            term = term * topk_weights[source][token, k].to(compute)
                        partial.append((k, term))
                if mode != "per_route" and partial:
                    partial = [(rank, _sum_in_order([term for _, term in partial]))]
                terms += [(order, term.to(wire_dtype).to(compute)) for order, term in partial]
            if mode == "per_node":
                of_node = [[term for rank, term in terms if rank in ranks] for ranks in nodes]
                sums = [(min(ranks), _sum_in_order(each)) for ranks, each in zip(nodes, of_node, strict=True) if each]
                terms = [(first, total.to(wire_dtype).to(compute)) for first, total in sums]
            total = torch.zeros(plan.hidden, dtype=compute, device="cpu")
            if terms:
                total = _sum_in_order([term for _, term in sorted(terms, key=lambda item: item[0])])
            for bias in biases[source] if biases else ():
                total = total + bias[token].to(compute)
            out[token] = total.to(out_dtype)
        outs.append(out)
    return outs


def combine_weights(
    plan: Plan, values: Sequence[torch.Tensor], routed: Sequence[Routed], topk_ids: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Bring home weights that belong to the rows of all ranks.

    Args:
        plan: sizes of the group.
        values: of each rank: float32 [rows, K] in layouts "token" and "rank", [rows] in "expert" and "slots".
        routed: result of ``dispatch``.
        topk_ids: [T, K] of each rank, as given to ``dispatch``.

    Returns:
        float32 [T, K] of each rank.
    """
    outs = []
    for source, ids in enumerate(topk_ids):
        out = torch.zeros(ids.shape[0], plan.top_k, dtype=torch.float32, device="cpu")
        for token in range(len(ids)):
            terms = []
            for there, found in zip(values, routed, strict=True):
                if (source, token) in found.rows:
                    terms.append(there.reshape(-1, plan.top_k)[found.rows[source, token]])
                for k in range(plan.top_k):
                    if (source, token, k) in found.rows:
                        out[token, k] = there.flatten()[found.rows[source, token, k]]
            if terms:
                out[token] = _sum_in_order(terms)
        outs.append(out)
    return outs


def _sum_in_order(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add up the terms, starting from the first and rounding each addition by itself."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def moe(
    plan: Plan,
    xs: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    w1: torch.Tensor,
    w2: torch.Tensor,
    shared_w1: torch.Tensor | None = None,
    shared_w2: torch.Tensor | None = None,
    *,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    shared_gate_weight: torch.Tensor | None = None,
    activation: Activation | str = SWIGLU,
    weight_layout: WeightLayout = PLAIN_WEIGHTS,
) -> list[torch.Tensor]:
    """Compute a whole layer for all ranks, given the routes.

    Args:
        plan: sizes of the group.
        xs: [T, H] of each rank.
        topk_ids: [T, K] of each rank.
        topk_weights: [T, K] of each rank.
        w1: [E, 2I, H], gate rows first, then up rows; [E, I, H] where the activation is not gated.
        w2: [E, H, I].
        shared_w1: [2S, H], gate rows first, or None without a shared expert.
        shared_w2: [H, S], or None without a shared expert.
        w1_bias: [E, 2I] in the order of w1's rows, or None.
        w2_bias: [E, H], or None.
        shared_gate_weight: [1, H], or None where the shared expert is not gated.
        activation: what lies between the products.
        weight_layout: how w1, w2 and w1_bias lie, where it is not as above.

    Returns:
        [T, H] of each rank.
    """
    activation = Activation.of(activation)
    routed = dispatch(plan, xs, topk_ids, topk_weights, "expert")
    ys = []
    for rank, received in enumerate(routed):
        offsets = received.expert_offsets or []
        parts = []
        for local, e in enumerate(range(rank * plan.experts_per_rank, (rank + 1) * plan.experts_per_rank)):
            first, second = (w1[e].T, w2[e].T) if weight_layout.transposed else (w1[e], w2[e])
            hidden = received.tokens[offsets[local] : offsets[local + 1]] @ first.T
            hidden = hidden if w1_bias is None else hidden + w1_bias[e]
            y = _activated(hidden, activation, weight_layout.interleaved) @ second.T
            parts.append(y if w2_bias is None else y + w2_bias[e])
        ys.append(torch.cat(parts))
    outs = combine(plan, ys, routed, topk_ids, topk_weights)
    if shared_w1 is None or shared_w2 is None:
        return outs
    shared = [_activated(x @ shared_w1.T, activation, False) @ shared_w2.T for x in xs]
    if shared_gate_weight is not None:
        shared = [torch.sigmoid(x @ shared_gate_weight.T) * y for x, y in zip(xs, shared, strict=True)]
    return [out + y for out, y in zip(outs, shared, strict=True)]


def fused_layer(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w1: torch.Tensor,
    w1_scales: torch.Tensor,
    w2: torch.Tensor,
    w2_scales: torch.Tensor,
    *,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    num_shared_experts: int = 0,
    activation: Activation | str = SWIGLU,
    recipe: str = "block",
    power_of_two_scales: bool = False,
) -> torch.Tensor:
    """Compute what ``MegaMoE`` returns for some tokens, given the weights of all experts.

    A token's result depends neither on other tokens nor on where experts are, so the tokens may be those of any ranks.
    Activations are rounded to float32 behind the route's weight, then quantised. A route's result is rounded to
    bfloat16. Those of a token are added in ascending k, in float32. Both products are float64 here. Kernels add them
    up in float32, in an order that the hardware chooses, so their results are near these.

    H and I are any widths. Behind the last whole block of 128 values, the rest is a block too: H / 128 is rounded up.
    Gates and ups begin with a block each, so w1 has 2 * (I / 128) rows of them, where I / 128 is rounded up.

    Args:
        x: floating point [T, H], or (float8_e4m3fn [T, H], float32 [T, H / 128]). Recipe "row": scales [T].
        topk_ids: int32 or int64 [T, K], -1 for an unused place.
        topk_weights: float32 [T, K].
        w1: float8_e4m3fn [E + S, 2I, H], gate rows first, then up rows; shared experts last.
        w1_scales: float32 [E + S, 2I / 128, H / 128]. Recipe "row": [E + S, 2I].
        w2: float8_e4m3fn [E + S, H, I].
        w2_scales: float32 [E + S, H / 128, I / 128]. Recipe "row": [E + S, H].
        w1_bias: float32 [E + S, 2I] in the order of w1's rows, or None.
        w2_bias: float32 [E + S, H], or None.
        num_shared_experts: S; every token goes to them with weight 1, behind its K places.
        activation: one with gates, or the name of one.
        recipe: which values share a scale, as in ``MegaMoE``.
        power_of_two_scales: round the scales of x and of activations up to powers of two.

    Returns:
        bfloat16 [T, H].
    """
    if recipe not in RECIPES:
        raise InvalidArgument(f"recipe is {recipe!r}, expected one of {', '.join(RECIPES)}")
    activation, shared = Activation.of(activation), list(range(len(w1) - num_shared_experts, len(w1)))
    by_row = recipe == "row"
    given = x if isinstance(x, tuple) else quantize_fp8(x, power_of_two_scales=power_of_two_scales, recipe=recipe)
    tokens = _dequantized(*(each.cpu() for each in given))
    ids = [[*experts, *shared] for experts in topk_ids.tolist()]
    weights = [[*places, *(1.0 for _ in shared)] for places in topk_weights.tolist()]
    results: dict[tuple[int, int], torch.Tensor] = {}  # of each (token, k)
    for e in range(len(w1)):
        routes = [(t, k) for t, experts in enumerate(ids) for k, expert in enumerate(experts) if expert == e]
        if not routes:
            continue
        factors = torch.tensor([[weights[t][k]] for t, k in routes], dtype=torch.float64, device="cpu")
        first, second = (
            _dequantized(w[e].cpu(), of_w[e].cpu() if by_row else _of_channels(of_w[e].cpu(), w.shape[1], parts))
            for w, of_w, parts in ((w1, w1_scales, 2), (w2, w2_scales, 1))
        )
        hidden = tokens[[t for t, _ in routes]] @ first.T
        hidden = hidden if w1_bias is None else hidden + w1_bias[e].cpu()
        activations = (_activated(hidden, activation, False) * factors).float()
        if by_row:
            activations = activations.bfloat16()
        quantised = quantize_fp8(activations, power_of_two_scales=power_of_two_scales or by_row, recipe=recipe)
        y = _dequantized(*quantised) @ second.T
        y = y if w2_bias is None else y + factors * w2_bias[e].cpu()
        results |= dict(zip(routes, y.to(torch.bfloat16), strict=True))
    out = torch.zeros(tokens.shape, dtype=torch.bfloat16, device="cpu")
    for t, experts in enumerate(ids):
        terms = [results[t, k].float() for k, expert in enumerate(experts) if expert >= 0]
        if terms:
            out[t] = _sum_in_order(terms).to(torch.bfloat16)
    return out


def _of_channels(scales: torch.Tensor, channels: int, parts: int) -> torch.Tensor:
    """Repeat scales of 128 channels for each of them. Each part of the channels begins with a scale of its own."""
    spread = scales.unflatten(0, (parts, -1)).repeat_interleave(FP8_BLOCK, 1)
    return spread[:, : channels // parts].flatten(0, 1)


def _dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply FP8 [N, K] in float64 by scales: of every 128 columns of each row, [N, K / 128], or of rows, [N]."""
    of_columns = scales.double()[:, None] if scales.dim() == 1 else scales.double().repeat_interleave(FP8_BLOCK, 1)
    return values.double() * of_columns[:, : values.shape[1]]


def _activated(hidden: torch.Tensor, activation: Activation, interleaved: bool) -> torch.Tensor:
    if not activation.gated:
        return _function_of(hidden, activation)
    width = hidden.shape[1] // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, width + i) for i in range(width)]
    gate, up = (hidden[:, [pair[part] for pair in pairs]] for part in range(2))
    if activation.limit is not None:
        gate = torch.clamp(gate, max=activation.limit)
        up = torch.clamp(up, min=-activation.limit, max=activation.limit)
    return _function_of(gate, activation) * (up + activation.up_offset)


def _function_of(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation.function == "silu":
        return x * torch.sigmoid(x * activation.alpha)
    if activation.function == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    if activation.function == "gelu_tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return torch.where(x > 0, x if activation.function == "relu" else x * x, torch.zeros_like(x))


def quantize_fp8(
    x: torch.Tensor, *, power_of_two_scales: bool = False, recipe: str = "block"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise as :func:`tokenloom.quantize_fp8` does, rounding to E4M3 by search in the table of its values.

    The computation and the results are on the CPU, wherever x is, because a CPU always divides as IEEE says. On GPUs
    torch multiplies by the reciprocal of a divisor that is a number or a CPU scalar.

    Args:
        x: floating point [..., H]. The last block is shorter where H is no multiple of 128.
        power_of_two_scales: round each scale up to a power of two and divide x by it.
        recipe: "block", or "row", where a block is all H values.

    Returns:
        q: float8_e4m3fn [..., H]; scales: float32 [..., H / 128], by recipe "row" [...].
    """
    table, width = _e4m3_values(), x.shape[-1]
    block_width = width if recipe == "row" else FP8_BLOCK
    padded = torch.zeros(*x.shape[:-1], align_up(width, block_width), dtype=torch.float32, device="cpu")
    padded[..., :width] = x.detach().cpu().float()
    blocks = padded.reshape(-1, block_width)
    q = torch.empty(blocks.shape, dtype=torch.uint8, device="cpu")
    scales = torch.empty(len(blocks), dtype=torch.float32, device="cpu")
    limit, floor = (torch.tensor(value, dtype=torch.float32, device="cpu") for value in (448.0, 1e-4))
    for row, block in enumerate(blocks):
        amax = torch.maximum(block.abs().max(), floor)
        scale = amax / limit
        scaled = block * (limit / amax)
        if power_of_two_scales:
            exponent = -40
            while exponent < 127 and 2.0**exponent < scale.item():
                exponent += 1
            scale = torch.tensor(2.0**exponent, dtype=torch.float32, device="cpu")
            scaled = block / scale
        scales[row] = scale
        q[row] = _nearest_e4m3(scaled.clamp(-448.0, 448.0), table)
    q = q.reshape(padded.shape)[..., :width].contiguous()
    shape = x.shape[:-1] if recipe == "row" else (*x.shape[:-1], padded.shape[-1] // FP8_BLOCK)
    return q.view(torch.float8_e4m3fn), scales.reshape(shape)


def _e4m3_values() -> torch.Tensor:
    """List the 127 finite magnitudes by their code: 4 bits of exponent (bias 7), 3 of mantissa."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _nearest_e4m3(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Find the codes of the nearest E4M3 values. Ties go to the even code."""
    magnitude = values.abs().double()
    above = torch.searchsorted(table, magnitude).clamp(max=126)
    below = (above - 1).clamp(min=0)
    to_above, to_below = table[above] - magnitude, magnitude - table[below]
    even = torch.where(above % 2 == 0, above, below)
    code = torch.where(to_above < to_below, above, torch.where(to_below < to_above, below, even))
    code = torch.where(to_above == 0, above, code)
    return (code + 128 * torch.signbit(values)).to(torch.uint8)
