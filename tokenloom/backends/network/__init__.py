"""Backend "network": ranks on several nodes, between which a token travels once for each node."""

from tokenloom.backends.network.registration import REGISTRATION

__all__ = ["REGISTRATION"]
