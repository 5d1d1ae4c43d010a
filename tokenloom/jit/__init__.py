"""Kernels compiled at first use: compiler.py (NVRTC), cache.py (on disk), kernel.py (load and launch)."""
