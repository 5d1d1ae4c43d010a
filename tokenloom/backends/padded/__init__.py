"""Backend "padded": kernels within nodes, and between their halves an all-to-all of fixed size."""

from tokenloom.backends.padded.registration import REGISTRATION

__all__ = ["REGISTRATION"]
