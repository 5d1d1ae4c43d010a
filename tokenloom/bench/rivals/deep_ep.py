"""DeepEP's dispatch and combine, for ``tokenloom bench comm``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tokenloom.bench.workload import Inputs, Operation, expert_outputs
from tokenloom.plan import Plan

NAME = "deep_ep"
OPERATIONS = (
    Operation("dispatch", "bf16", "token"),
    Operation("dispatch", "fp8", "token"),
    Operation("combine", "bf16", "token"),
)
"""Operations of the normal mode of its ``Buffer``: rows in the order of layout "token", an unweighted sum."""


def why_not(device: str, num_ranks: int) -> str | None:
    """The reason that it cannot be measured on these ranks, or None."""
    if device != "cuda":
        return f"it needs GPUs, the ranks are on {device}"
    try:
        importlib.import_module(NAME).Buffer.get_dispatch_config(num_ranks)
    except Exception as error:  # a build for another torch, or without what it links to, fails in many ways
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def default_sms() -> int:
    """SMs that its kernels take by its own default."""
    return int(importlib.import_module(NAME).Buffer.num_sms)


class DeepEp:
    """The ``Buffer`` of deep_ep in its normal mode within a host. Making one is collective."""

    def __init__(self, group: dist.ProcessGroup, plan: Plan) -> None:
        module = importlib.import_module(NAME)
        configs = (module.Buffer.get_dispatch_config, module.Buffer.get_combine_config)
        row_bytes = plan.hidden * torch.bfloat16.itemsize
        sizes = [make(plan.num_ranks).get_nvl_buffer_size_hint(row_bytes, plan.num_ranks) for make in configs]
        self._buffer = module.Buffer(group, max(sizes), explicitly_destroy=True)
        self._ids_dtype = getattr(module, "topk_idx_t", torch.int64)
        self._num_experts = plan.num_experts

    def prepared_call(self, operation: Operation, inputs: Inputs) -> Callable[[], Any]:
        """One of OPERATIONS, ready to be called again and again. Collective.

        A dispatch starts by counting where the tokens go, as it does in programs that use deep_ep.
        """
        ids = inputs.ids.to(self._ids_dtype)
        x = inputs.fp8 if operation.payload == "fp8" else inputs.x

        def dispatch() -> Any:
            per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(ids, self._num_experts)
            return self._buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=inputs.weights,
            )

        if operation.name == "dispatch":
            return dispatch
        rows, _, _, _, handle, _ = dispatch()
        y = expert_outputs(rows)
        return lambda: self._buffer.combine(y, handle)

    def close(self) -> None:
        """Release its buffers. Collective."""
        self._buffer.destroy()
