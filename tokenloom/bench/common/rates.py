"""What the hardware moves at best, for floors."""

from tokenloom.tune.network.constants import FITTED

LINK_GBYTES_PER_S = FITTED.nvlink_gbytes_per_s
"""Bytes that the NVLinks of an H200 carry out of it, measured; 1 GB is 1e9 bytes."""
