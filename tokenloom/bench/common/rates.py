"""What the hardware moves at best, for floors."""

LINK_GBYTES_PER_S = 347.0
"""Bytes that the NVLinks of an H200 carry out of it, measured; 1 GB is 1e9 bytes."""
