"""``deep_ep.Buffer``: normal and low-latency mode, served by communicators."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tokenloom.compat.deep_ep.buffer_base import captured
from tokenloom.compat.deep_ep.config import Config, config_for, most_sms, nodes_of
from tokenloom.compat.deep_ep.events import EventOverlap
from tokenloom.compat.deep_ep.faults import NotServed, naming, require
from tokenloom.compat.deep_ep.low_latency import LowLatencyMode
from tokenloom.compat.deep_ep.normal import NormalMode

__all__ = ["Buffer"]


class Buffer(NormalMode, LowLatencyMode):
    """Moves the tokens of mixture-of-experts layers to their experts and back, by the calls of ``deep_ep.Buffer``.

    Making one sends and allocates nothing. Communicators are made when a shape of call first comes. One buffer serves
    both modes, any hidden size whose rows are multiples of 16 bytes, and any number of ranks; K is at most 32.

    Args:
        group: the process group, over gloo for CPU tensors, over NCCL or gloo for CUDA tensors.
        num_nvl_bytes: kept for the client, otherwise unused.
        num_rdma_bytes: kept for the client, otherwise unused.
        low_latency_mode: kept for the client; both modes work either way.
        num_qps_per_rank: unused; upstream opens networks itself.
        allow_nvlink_for_low_latency_mode: unused.
        allow_mnnvl: unused.
        explicitly_destroy: ``destroy`` will be called.
        enable_shrink: mask ranks that do not come in time, and let the client mask ranks.
        comm: an MPI communicator; not served.
        use_fabric: unused.

    Attributes:
        group, rank, group_size: the ranks.
        num_nvl_bytes, num_rdma_bytes, low_latency_mode, enable_shrink: the arguments.
        runtime: None after ``destroy``.

    Raises:
        ValueError: ``group`` and ``comm`` are both missing.
        NotServed: an argument that tokenloom has nothing for.
    """

    @naming("Buffer")
    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        use_fabric: bool = False,
    ) -> None:
        if group is None:
            if comm is None:
                raise ValueError("Buffer: pass group, a torch.distributed process group")
            raise NotServed("comm is not served: pass group, a torch.distributed process group")
        options: dict[str, Any] = {"num_sms": min(type(self).num_sms, most_sms())}
        if enable_shrink:
            options["on_timeout"] = "mask"
        super().__init__(group, explicitly_destroy, options)
        self.rank, self.group_size = group.rank(), group.size()
        self._num_nodes = nodes_of(self.group_size, self._options["ranks_per_node"])
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self._forms = {}

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: kernels for Hopper GPUs compile where they run."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Set the SMs of kernels for buffers made from now on: an even number, of which at most 32 are used.

        Kernels of low-latency mode, which end soon, always take 32.

        Raises:
            BadCall: the number is odd or not positive.
        """
        is_even = isinstance(new_num_sms, int) and new_num_sms > 0 and new_num_sms % 2 == 0
        require(is_even, f"Buffer.set_num_sms: {new_num_sms!r} is not even and positive")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Record the current stream's work so far."""
        return captured()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return settings for ``dispatch``. Raise BadCall if no group has that size."""
        return config_for(num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return settings for ``combine``. Raise BadCall if no group has that size."""
        return config_for(num_ranks)

    @naming("Buffer.get_local_buffer_tensor")
    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Return an empty tensor: there is no buffer that a client has to clean.

        Raises:
            NotServed: a part of the buffer is asked for.
        """
        if size is not None and torch.Size(size).numel():
            raise NotServed("size is not served: there is no buffer to look into")
        return torch.empty(0, dtype=dtype)
