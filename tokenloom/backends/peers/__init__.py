"""The host engine of all kernels: opening calls, their outcomes, dispatch and combine, handles, buffers.

Backend "nvlink" is its user where all ranks reach each other's memory, and so are the kernels between nodes.
"""

from tokenloom.backends.peers.backend import MAX_SMS, REGISTRATION

__all__ = ["MAX_SMS", "REGISTRATION"]
