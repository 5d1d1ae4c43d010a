"""Tests. Processes of ranks import this too."""

import os

if "TOKENLOOM_TEST_RANKS" in os.environ:  # ranks may share GPUs, see conftest.py
    from tokenloom.backends.peers import backend

    backend.gpu_identity = lambda device: f"of process {os.getpid()}"
