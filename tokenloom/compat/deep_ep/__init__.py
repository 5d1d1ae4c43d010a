"""DeepEP's names, served by tokenloom.

A program written for ``deep_ep`` runs unchanged once this package is importable under that name: install the
distribution ``tokenloom-deep-ep``, or put ``python -m tokenloom deep-ep-path`` on PYTHONPATH, or call
``tokenloom.compat.install()``. Names, arguments and tensors are DeepEP's (https://github.com/deepseek-ai/DeepEP).

Importing needs neither CUDA nor NCCL.
"""

from tokenloom._version import __version__ as _version
from tokenloom.compat.deep_ep.buffer import Buffer
from tokenloom.compat.deep_ep.config import Config, topk_idx_t
from tokenloom.compat.deep_ep.elastic import ElasticBuffer, get_logical_domain_size, get_physical_domain_size
from tokenloom.compat.deep_ep.ep_handle import EPHandle
from tokenloom.compat.deep_ep.events import EventHandle, EventOverlap
from tokenloom.compat.deep_ep.hybrid_ep_buffer import HybridEPBuffer, HybridEpConfigInstance

__version__ = f"2.1.0+tokenloom.{_version}"
"""Version of the contract, and of tokenloom, which serves it."""

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "HybridEpConfigInstance",
    "__version__",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]
