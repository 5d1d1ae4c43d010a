"""Counts of all ranks."""
