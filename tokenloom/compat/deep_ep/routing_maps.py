"""Routes of a client of HybridEPBuffer: ids, or maps of all experts."""

from __future__ import annotations

import torch

from tokenloom.compat.deep_ep import checks
from tokenloom.compat.deep_ep.faults import NotServed, require
from tokenloom.plan import MAX_TOP_K


def indices_to_map(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn ids into a map.

    Args:
        topk_idx: integers [N, K], -1 is no route.
        topk_weights: float32 [N, K], or None.
        num_of_tokens: N.
        num_of_experts: E.

    Returns:
        routing_map bool [N, E], and probs float32 [N, E], 0 where there is no route, or None.
    """
    require(
        topk_idx.ndim == 2 and len(topk_idx) == num_of_tokens,
        f"indices_to_map: topk_idx is {list(topk_idx.shape)}, expected [{num_of_tokens}, top-k]",
    )
    routing_map = dense(torch.ones_like(topk_idx, dtype=torch.int32), topk_idx, num_of_experts) > 0
    return routing_map, None if topk_weights is None else dense(topk_weights.float(), topk_idx, num_of_experts)


def dense(values: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Spread values [N, K] of routes over experts: [N, E], 0 without a route."""
    out = values.new_zeros(len(ids), num_experts + 1)  # the last column takes ids that are no route
    columns = ids.clamp(-1, num_experts).remainder(num_experts + 1).long()
    return out.scatter_add_(1, columns, values)[:, :num_experts].contiguous()


def ids_of_map(routing_map: torch.Tensor, top_k: int) -> torch.Tensor:
    """Turn a map bool [N, E] into ids int64 [N, K], ascending, -1 behind the last."""
    num_experts = routing_map.shape[1]
    keys = num_experts - torch.arange(num_experts, device=routing_map.device)  # topk gives the largest first
    chosen = torch.where(routing_map, keys, 0)
    chosen = torch.nn.functional.pad(chosen, (0, max(0, top_k - num_experts))).topk(top_k, dim=1).values
    return torch.where(chosen > 0, num_experts - chosen, -1)


class Routes:
    """Routes of tokens, from checked ids or a checked map."""

    def __init__(
        self,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        routing_map: torch.Tensor | None,
        probs: torch.Tensor | None,
        num_experts: int,
        num_tokens: int,
        device: torch.device,
    ) -> None:
        require((topk_idx is None) != (routing_map is None), "pass topk_idx or routing_map, and not both")
        if topk_idx is not None:
            checks.ids_of(topk_idx, num_tokens, device)
            if topk_weights is not None:
                topk_weights = checks.like("topk_weights", topk_weights, topk_idx.shape, torch.float32, device)
        else:
            shape = [num_tokens, num_experts]
            routing_map = checks.like("routing_map", routing_map, shape, torch.bool, device)
            if probs is not None:
                probs = checks.like("probs", checks.tensor("probs", probs).contiguous(), shape, torch.float32, device)
        self._ids, self._weights, self._map, self._probs = topk_idx, topk_weights, routing_map, probs
        self.weighted = (topk_weights if topk_idx is not None else probs) is not None

    def width(self, non_blocking: bool) -> int:
        """Find K: the columns of the ids, or the most routes of a token in the map.

        If the host may not read the map, K is the number of experts, at most 32.

        Raises:
            NotServed: a token has more than 32 routes. If the host may not read the map, calls report a wrong id.
        """
        if self._ids is not None:
            return self._ids.shape[1]
        assert self._map is not None
        if non_blocking and self._map.is_cuda:
            return min(self._map.shape[1], MAX_TOP_K)
        most = int(self._map.sum(1).max()) if len(self._map) else 1
        if most > MAX_TOP_K:
            raise NotServed(f"routing_map has a token with {most} experts, tokenloom serves at most {MAX_TOP_K}")
        return min(self._map.shape[1], MAX_TOP_K) if non_blocking else max(1, most)

    def by_token(self, top_k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ids int64 [N, K], the caller's own if there are some, and weights float32 [N, K] or None."""
        if self._ids is not None:
            return self._ids, self._weights
        assert self._map is not None
        ids = ids_of_map(self._map, top_k)
        if self._map.shape[1] > top_k:  # a wrong id stands for too many routes: calls report it without a host read
            ids = torch.where((self._map.sum(1) > top_k)[:, None], self._map.shape[1], ids)
        return ids, None if self._probs is None else self._probs.gather(1, ids.clamp(0, self._map.shape[1] - 1))
