"""What backend "gin" can do, for whoever does not use it."""

from __future__ import annotations

import torch

from tokenloom.backends.seam import Capabilities

CAPABILITIES = Capabilities(
    layouts=("token", "expert", "rank", "slots"),
    dispatch_strategies=("dedup",),
    combine_strategies=("per_node",),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    captures=True,
    takes_sms=True,
    own_node="nvlink",
    other_nodes="gin",
    reads_on_host=False,
    weights_apart=False,
    own_transport=True,
)
