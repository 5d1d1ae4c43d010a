"""tokenloom: expert parallelism for mixture-of-experts models. See README.md and docs/."""

from tokenloom._version import __version__
from tokenloom.communicator import Communicator, Routed
from tokenloom.errors import (
    BackendUnavailable,
    CapacityOverflow,
    CommunicatorBroken,
    DeviceMismatch,
    DtypeMismatch,
    InvalidArgument,
    InvalidExpertId,
    NotDifferentiable,
    PeerError,
    PeerTimeout,
    PlanMismatch,
    ShapeMismatch,
    TokenloomError,
)
from tokenloom.layer import ExpertParallelMoE, gather_state_dict, shard_state_dict
from tokenloom.quant import dequantize_fp8, quantize_fp8
from tokenloom.router import Router
from tokenloom.streams import Event

__all__ = [
    "BackendUnavailable",
    "CapacityOverflow",
    "Communicator",
    "CommunicatorBroken",
    "DeviceMismatch",
    "DtypeMismatch",
    "Event",
    "ExpertParallelMoE",
    "InvalidArgument",
    "InvalidExpertId",
    "NotDifferentiable",
    "PeerError",
    "PeerTimeout",
    "PlanMismatch",
    "Routed",
    "Router",
    "ShapeMismatch",
    "TokenloomError",
    "__version__",
    "dequantize_fp8",
    "gather_state_dict",
    "quantize_fp8",
    "shard_state_dict",
]
