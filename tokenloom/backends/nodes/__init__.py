"""Backends for ranks on several nodes: "network" by collectives in two hops, "gin" and "padded" by kernels."""

from tokenloom.backends.nodes.registration import REGISTRATIONS

__all__ = ["REGISTRATIONS"]
