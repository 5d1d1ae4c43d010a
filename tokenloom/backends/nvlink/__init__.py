"""Backend "nvlink": our own kernels over the peers' memory, for one NVLink domain of Hopper GPUs."""

from tokenloom.backends.nvlink.registration import DEFAULT_SMS, MAX_SMS, REGISTRATION

__all__ = ["DEFAULT_SMS", "MAX_SMS", "REGISTRATION"]
