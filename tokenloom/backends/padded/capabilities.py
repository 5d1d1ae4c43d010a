"""What backend "padded" can do, for whoever does not use it."""

from __future__ import annotations

from dataclasses import replace

from tokenloom.backends.gin.capabilities import CAPABILITIES as OF_GIN

CAPABILITIES = replace(OF_GIN, other_nodes="collective", own_transport=False, weights_apart=True)
