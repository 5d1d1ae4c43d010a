"""``deep_ep.ElasticBuffer``: its constructor, and the sizes that clients ask for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tokenloom.compat.deep_ep.elastic_calls import ElasticCalls
from tokenloom.compat.deep_ep.events import EventHandle
from tokenloom.compat.deep_ep.faults import naming, refuse, require
from tokenloom.plan import align_up

__all__ = ["ElasticBuffer", "get_logical_domain_size", "get_physical_domain_size"]


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return (ranks that a network connects, ranks that memory connects): (1, R), since the group is one domain."""
    return 1, group.size()


def get_logical_domain_size(group: dist.ProcessGroup, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return :func:`get_physical_domain_size`: no mode divides the group."""
    return get_physical_domain_size(group)


class ElasticBuffer(ElasticCalls):
    """Moves tokens by the calls of ``deep_ep.ElasticBuffer``. Rows always lie in the order source rank, token, k.

    Making one sends and allocates nothing.

    Args:
        group: the process group, over gloo for CPU tensors, over NCCL or gloo for CUDA tensors.
        num_bytes: kept for the client, by default what ``get_buffer_size_hint`` says.
        num_cpu_bytes: not served; 0.
        num_max_tokens_per_rank: M of calls that pass none.
        hidden: for ``num_bytes`` alone; calls may have any.
        num_topk: for ``num_bytes`` alone.
        use_fp8_dispatch: for ``num_bytes`` alone.
        deterministic: results always are.
        allow_hybrid_mode: unused; it tunes upstream's networks and kernels.
        allow_multiple_reduction: unused.
        prefer_overlap_with_compute: unused.
        sl_idx: unused.
        num_allocated_qps: kept for the client, otherwise unused.
        num_cpu_timeout_secs: longest wait for another rank to open a call, in seconds.
        num_gpu_timeout_secs: longest wait for another rank inside a call, in seconds.
        explicitly_destroy: ``destroy`` will be called.

    Attributes:
        group, num_bytes, num_max_tokens_per_rank, num_allocated_qps: the arguments.
        num_ranks, rank_idx: R, and this process's rank.
        num_scaleout_ranks, num_scaleup_ranks: 1 and R.

    Raises:
        NotServed: an argument that tokenloom has nothing for.
    """

    @naming("ElasticBuffer")
    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        refuse(num_cpu_bytes=num_cpu_bytes)
        options: dict[str, Any] = {
            "timeout_s": float(num_gpu_timeout_secs),
            "open_timeout_s": float(num_cpu_timeout_secs),
        }
        super().__init__(group, explicitly_destroy, options)
        self.num_ranks, self.rank_idx = group.size(), group.rank()
        self.num_scaleout_ranks, self.num_scaleup_ranks = get_physical_domain_size(group)
        is_number = isinstance(num_max_tokens_per_rank, int) and num_max_tokens_per_rank >= 0
        require(
            is_number, f"num_max_tokens_per_rank is {num_max_tokens_per_rank!r}, expected an integer of at least 0"
        )
        self.num_max_tokens_per_rank, self.num_allocated_qps = num_max_tokens_per_rank, num_allocated_qps
        if num_bytes is None:
            sizes = (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
            num_bytes = self.get_buffer_size_hint(group, *sizes)
        self.num_bytes = num_bytes

    # -- what clients ask for -------------------------------------------------------------------------------

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        **others: Any,
    ) -> int:
        """Return bytes that a client plans for: rows of the worst case, received and combined.

        tokenloom allocates memory at the first call that needs it.

        Args:
            **others: upstream's further options, which change nothing here.
        """
        row = hidden * (1 if use_fp8_dispatch else 2) + hidden * 2 + 8 * num_topk
        return align_up(group.size() * num_max_tokens_per_rank * row, 128)

    @staticmethod
    def capture() -> EventHandle:
        """Record the current stream's work so far."""
        return EventHandle()

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return one for each SM, as clients plan; tokenloom opens no queues."""
        return max(1, num_sms)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return what the function of this name returns."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return what the function of this name returns."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    @naming("ElasticBuffer.barrier")
    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = False) -> None:
        """Wait on the host until all ranks have come here, whatever the arguments."""
        on_cuda = torch.cuda.is_available() and "gloo" not in dist.get_backend_config(self.group)
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        if on_cuda:
            torch.cuda.synchronize(device)
        self._calls.meeting(device).all_gather_object(None, "ElasticBuffer.barrier")
