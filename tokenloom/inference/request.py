"""One call of a MegaMoE, as its implementations get it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenloom.backends.seam import DispatchOptions, Tokens
from tokenloom.comm import checks
from tokenloom.comm.engine import Engine
from tokenloom.inference.schedules import MegaSchedule

Biases = tuple[torch.Tensor | None, torch.Tensor | None]
"""Of w1 and of w2, float32, or None where there is none."""


@dataclass(eq=False)
class ForwardRequest:
    """Arguments of :meth:`tokenloom.MegaMoE.forward`, and what the implementation has to call.

    Attributes:
        x: values [T, H], or (float8_e4m3fn [T, H], float32 [T, H / 128]).
        topk_ids: int32 or int64 [T, K], -1 for an unused place.
        topk_weights: float32 [T, K].
        expert_stats: int32 [E / W], to which numbers of routes are added, or None.
        checked: function that checks the other arguments and returns the tensor for the output.
        schedule: schedule of the call, or None to choose one.
        passed: function to call with the name of each stage once it is on the stream.
    """

    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    expert_stats: torch.Tensor | None
    checked: Callable[[], torch.Tensor]
    schedule: MegaSchedule | None
    passed: Callable[[str], None]

    @property
    def is_quantised(self) -> bool:
        """True where x comes in FP8 with scales."""
        return isinstance(self.x, (tuple, list))

    def checked_dispatch(self, engine: Engine) -> Tokens:
        """Check the tensors that the dispatch of this call is given."""
        options = DispatchOptions("expert", 1, "bounded", 1, to_fp8=not self.is_quantised)
        able, device = engine.capabilities, engine.ranks.device
        given = (self.x, self.topk_ids, self.topk_weights)
        return checks.dispatch_tokens(engine.plan, able, device, options, *given)[0]
