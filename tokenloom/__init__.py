"""tokenloom: expert parallelism for mixture-of-experts models. See README.md and docs/.

Public are the names in ``__all__`` of ``tokenloom``, ``tokenloom.errors``, ``tokenloom.reference``,
``tokenloom.tune``, ``tokenloom.compat``, ``tokenloom.compat.deep_ep``, ``tokenloom.compat.deep_gemm`` and
``tokenloom.integrations.transformers``. Everything else may change from one version to the next.

Names load on first use, so that ``import tokenloom`` and ``tokenloom --help`` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenloom._version import __version__

if TYPE_CHECKING:
    from tokenloom import tune
    from tokenloom.backends.seam import DispatchOut, Strategy
    from tokenloom.comm.balance import BalanceStats
    from tokenloom.comm.communicator import Communicator
    from tokenloom.comm.engine import Pending
    from tokenloom.comm.expert_stats import ExpertStats
    from tokenloom.comm.move_experts import MovingExperts, move_experts
    from tokenloom.comm.placement import Placement
    from tokenloom.comm.plan_replicas import plan_replicas
    from tokenloom.comm.pulled_experts import pull_experts, sum_pulled_gradients
    from tokenloom.comm.restore_experts import restore_experts
    from tokenloom.comm.routed import Routed
    from tokenloom.errors import (
        BackendUnavailable,
        CapacityOverflow,
        CommunicatorBroken,
        DeviceMismatch,
        DtypeMismatch,
        ImplausibleRates,
        InvalidArgument,
        InvalidExpertId,
        KernelCompileError,
        NotDifferentiable,
        PeerError,
        PeerTimeout,
        PlanMismatch,
        ShapeMismatch,
        TokenloomError,
    )
    from tokenloom.inference.mega_moe import MegaMoE
    from tokenloom.ops.gemm import grouped_gemm_fp8, grouped_swiglu_fp8, interleave_gate_and_up
    from tokenloom.ops.quant import (
        MXFP4,
        FourBits,
        WeightReport,
        dequantize_four_bits,
        dequantize_fp8,
        pack_weights,
        quantize_fp8,
        quantize_fp8_blocks,
        weights_for,
    )
    from tokenloom.ops.router import Router
    from tokenloom.plan import Activation, WeightLayout
    from tokenloom.training.data_parallel import clip_grad_norm_, data_parallel, split_parameters
    from tokenloom.training.expert_module import RoutedExperts
    from tokenloom.training.layer import ExpertParallelMoE
    from tokenloom.training.replicas import copy_replicas, follow_placement, place_experts, reduce_replica_gradients
    from tokenloom.training.state_dict import gather_state_dict, shard_state_dict

_MODULE_OF = {
    "Activation": "plan",
    "BalanceStats": "comm.balance",
    "Communicator": "comm.communicator",
    "DispatchOut": "backends.seam",
    "ExpertParallelMoE": "training.layer",
    "ExpertStats": "comm.expert_stats",
    "MegaMoE": "inference.mega_moe",
    "MovingExperts": "comm.move_experts",
    "Pending": "comm.engine",
    "Placement": "comm.placement",
    "Routed": "comm.routed",
    "RoutedExperts": "training.expert_module",
    "Router": "ops.router",
    "Strategy": "backends.seam",
    "WeightLayout": "plan",
    "FourBits": "ops.quant",
    "MXFP4": "ops.quant",
    "WeightReport": "ops.quant",
    "clip_grad_norm_": "training.data_parallel",
    "copy_replicas": "training.replicas",
    "data_parallel": "training.data_parallel",
    "dequantize_four_bits": "ops.quant",
    "dequantize_fp8": "ops.quant",
    "follow_placement": "training.replicas",
    "gather_state_dict": "training.state_dict",
    "grouped_gemm_fp8": "ops.gemm",
    "grouped_swiglu_fp8": "ops.gemm",
    "interleave_gate_and_up": "ops.gemm",
    "move_experts": "comm.move_experts",
    "pack_weights": "ops.quant",
    "place_experts": "training.replicas",
    "plan_replicas": "comm.plan_replicas",
    "pull_experts": "comm.pulled_experts",
    "quantize_fp8": "ops.quant",
    "quantize_fp8_blocks": "ops.quant",
    "reduce_replica_gradients": "training.replicas",
    "restore_experts": "comm.restore_experts",
    "shard_state_dict": "training.state_dict",
    "split_parameters": "training.data_parallel",
    "sum_pulled_gradients": "comm.pulled_experts",
    "weights_for": "ops.quant",
}

__all__ = [
    "MXFP4",
    "Activation",
    "BackendUnavailable",
    "BalanceStats",
    "CapacityOverflow",
    "Communicator",
    "CommunicatorBroken",
    "DeviceMismatch",
    "DispatchOut",
    "DtypeMismatch",
    "ExpertParallelMoE",
    "ExpertStats",
    "FourBits",
    "ImplausibleRates",
    "InvalidArgument",
    "InvalidExpertId",
    "KernelCompileError",
    "MegaMoE",
    "MovingExperts",
    "NotDifferentiable",
    "PeerError",
    "PeerTimeout",
    "Pending",
    "Placement",
    "PlanMismatch",
    "Routed",
    "RoutedExperts",
    "Router",
    "ShapeMismatch",
    "Strategy",
    "TokenloomError",
    "WeightLayout",
    "WeightReport",
    "__version__",
    "clip_grad_norm_",
    "copy_replicas",
    "data_parallel",
    "dequantize_four_bits",
    "dequantize_fp8",
    "follow_placement",
    "gather_state_dict",
    "grouped_gemm_fp8",
    "grouped_swiglu_fp8",
    "interleave_gate_and_up",
    "move_experts",
    "pack_weights",
    "place_experts",
    "plan_replicas",
    "pull_experts",
    "quantize_fp8",
    "quantize_fp8_blocks",
    "reduce_replica_gradients",
    "restore_experts",
    "shard_state_dict",
    "split_parameters",
    "sum_pulled_gradients",
    "tune",
    "weights_for",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tokenloom' has no attribute {name!r}")
    if name == "tune":
        return import_module("tokenloom.tune")
    value = getattr(import_module(f"tokenloom.{_MODULE_OF.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
