"""How often each expert is chosen, counted on the device while a program runs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tokenloom.comm.communicator import Communicator
from tokenloom.errors import DeviceMismatch, DtypeMismatch, InvalidArgument, ShapeMismatch, require_type


def max_vio(expert_counts: torch.Tensor) -> torch.Tensor:
    """MaxVio, the largest load of an expert over the mean, less 1: 0 is even, E - 1 is all routes to one expert.

    Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, section 4.1.

    Args:
        expert_counts: routes of each expert, [E].

    Returns:
        float64 [], on the device of the counts; 0 where nothing was counted.
    """
    counts = expert_counts.double()
    mean = counts.mean()
    return torch.where(mean > 0, counts.max() / mean - 1, 0.0)


class ExpertStats:
    """Running counts of routes to each logical expert, for :func:`tokenloom.plan_replicas`.

    Counts stay on the device, and :meth:`add` never makes the host wait: it may be captured in a CUDA graph, whose
    replays then count. Make one outside of the graph, and one for each layer.

    Args:
        num_experts: E.
        device: where the ids will be. None means the current default of torch.
        decay: what remains of earlier counts at each :meth:`add`, above 0 and below 1: with 0.99, half of a count is
            left after 69 adds. None keeps all of them.

    Raises:
        InvalidArgument: an argument has a value that is never right.
    """

    def __init__(
        self, num_experts: int, *, device: torch.device | str | None = None, decay: float | None = None
    ) -> None:
        if isinstance(num_experts, bool) or not isinstance(num_experts, int) or num_experts < 1:
            raise InvalidArgument(f"num_experts is {num_experts!r}, expected a whole number of at least 1")
        if decay is not None and not (isinstance(decay, float) and 0 < decay < 1):
            raise InvalidArgument(f"decay is {decay!r}, expected a number above 0 and below 1, or None to keep all")
        self._decay = decay
        # One more than there are experts: the last counts places without a route.
        self._batch = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        self._counts = torch.zeros_like(self._batch, dtype=torch.int64 if decay is None else torch.float64)
        self._one = torch.ones((), dtype=torch.int64, device=device)

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self._counts) - 1

    @torch.no_grad()
    def add(self, topk_ids: torch.Tensor) -> None:
        """Count the routes of a batch. The host does not wait.

        Args:
            topk_ids: int32 or int64, of any shape. Ids that name no expert, such as -1, are not counted.

        Raises:
            DtypeMismatch, DeviceMismatch: the ids are of another dtype, or elsewhere.
        """
        if not isinstance(topk_ids, torch.Tensor) or topk_ids.dtype not in (torch.int32, torch.int64):
            what = topk_ids.dtype if isinstance(topk_ids, torch.Tensor) else type(topk_ids).__name__
            raise DtypeMismatch(f"topk_ids is {what}, expected a tensor of int32 or int64 ids")
        if topk_ids.device != self._counts.device:
            raise DeviceMismatch(
                f"topk_ids is on {topk_ids.device}, the counts are on {self._counts.device}; "
                f"pass device={str(topk_ids.device)!r} to ExpertStats"
            )
        ids = topk_ids.flatten().long()
        ids = torch.where((ids < 0) | (ids >= self.num_experts), self.num_experts, ids)
        if self._decay is None:
            self._counts.scatter_add_(0, ids, self._one.expand_as(ids))
            return
        # Whole numbers first: sums of fractions would depend on the order in which the device adds them.
        self._batch.zero_().scatter_add_(0, ids, self._one.expand_as(ids))
        self._counts.mul_(self._decay).add_(self._batch)

    def counts(self) -> torch.Tensor:
        """This rank's counts, as a new tensor on the device: int64 [E], or float64 [E] where they decay."""
        return self._counts[: self.num_experts].clone()

    @torch.no_grad()
    def sum_over_ranks(self, ranks: Communicator | dist.ProcessGroup | None = None) -> torch.Tensor:
        """Sum the counts of all ranks. Collective: all ranks call it, between calls of the communicator.

        Args:
            ranks: the communicator, whose timeouts and masked ranks count here too; or a process group. None means the
                default group, or this process alone where torch.distributed is not initialised.

        Returns:
            A new tensor, the same on all ranks: int64 [E], or float64 [E] where counts decay.

        Raises:
            ShapeMismatch: the communicator is for another number of experts.
            InvalidArgument: ``ranks`` is neither.
        """
        counts = self.counts()
        if isinstance(ranks, Communicator):
            if ranks.plan.num_experts != self.num_experts:
                raise ShapeMismatch(
                    f"the counts are of {self.num_experts} experts, the communicator was made for "
                    f"{ranks.plan.num_experts}; pass num_experts={ranks.plan.num_experts} to ExpertStats"
                )
            return ranks.engine.ranks.all_reduce_sums([counts], "expert counts")[0]
        if ranks is not None:
            require_type("ranks", ranks, dist.ProcessGroup, "a tokenloom.Communicator or a ProcessGroup")
        if ranks is not None or dist.is_initialized():
            dist.all_reduce(counts, group=ranks)
        return counts

    def max_vio(self) -> torch.Tensor:
        """MaxVio of this rank's routing: the largest count over the mean, less 1; 0 where nothing was counted.

        Returns:
            float64 [] on the device. ``float()`` of it makes the host wait.
        """
        return max_vio(self.counts())

    def reset(self) -> None:
        """Forget all counts. The host does not wait."""
        self._counts.zero_()
