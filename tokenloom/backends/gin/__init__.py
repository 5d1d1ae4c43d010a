"""Backend "gin": kernels that reach other nodes by NCCL's GPU-initiated networking, and their own over NVLink."""

from tokenloom.backends.gin.registration import REGISTRATION

__all__ = ["REGISTRATION"]
