"""The public surface of deep_ep, name by name, and signature by signature, as its clients use it."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.support.on_ranks import on_ranks
from tokenloom.compat import deep_ep
from tokenloom.compat.deep_ep.faults import BadCall
from tokenloom.runtime.processes import RankContext

MAIN = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "__version__",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]
HYBRID = ["Buffer", "Config", "EventOverlap", "HybridEPBuffer", "HybridEpConfigInstance"]
SUBMODULES = {
    "hybrid_ep_buffer": ["HybridEPBuffer", "indices_to_map"],
    "utils": ["EventHandle", "EventOverlap"],
    "utils.event": ["EventHandle", "EventOverlap"],
    "utils.envs": ["dist_print", "get_global_seed", "get_local_seed", "init_dist", "init_seed"],
    "utils.math": [
        "align",
        "calc_diff",
        "ceil_div",
        "count_bytes",
        "create_grouped_scores",
        "hash_tensor",
        "hash_tensors",
        "inplace_unique",
        "per_token_cast_back",
        "per_token_cast_to_fp8",
        "safe_div",
    ],
    "utils.testing": ["bench", "bench_kineto"],
}
STREAMS = {"previous_event": None, "async_finish": False, "allocate_on_comm_stream": False}
ELASTIC_STREAMS = {
    "previous_event": None,
    "previous_event_before_epilogue": None,
    "async_with_compute_stream": False,
    "allocate_on_comm_stream": False,
}
REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[str, dict[str, Any]] = {
    "Buffer": {
        "group": None,
        "num_nvl_bytes": 0,
        "num_rdma_bytes": 0,
        "low_latency_mode": False,
        "num_qps_per_rank": 24,
        "allow_nvlink_for_low_latency_mode": True,
        "allow_mnnvl": False,
        "explicitly_destroy": False,
        "enable_shrink": False,
        "comm": None,
        "use_fabric": False,
    },
    "Buffer.get_dispatch_layout": {"topk_idx": REQUIRED, "num_experts": REQUIRED, **STREAMS},
    "Buffer.dispatch": {
        "x": REQUIRED,
        "handle": None,
        "num_tokens_per_rank": None,
        "num_tokens_per_rdma_rank": None,
        "is_token_in_rank": None,
        "num_tokens_per_expert": None,
        "topk_idx": None,
        "topk_weights": None,
        "expert_alignment": 1,
        "num_worst_tokens": 0,
        "config": None,
        **STREAMS,
    },
    "Buffer.combine": {
        "x": REQUIRED,
        "handle": REQUIRED,
        "topk_weights": None,
        "bias": None,
        "config": None,
        **STREAMS,
    },
    "Buffer.internode_dispatch": {"x": REQUIRED, "handle": None},  # the rest as of dispatch
    "Buffer.internode_combine": {"x": REQUIRED, "handle": REQUIRED, "topk_weights": None, "bias": None},
    "Buffer.low_latency_dispatch": {
        "x": REQUIRED,
        "topk_idx": REQUIRED,
        "num_max_dispatch_tokens_per_rank": REQUIRED,
        "num_experts": REQUIRED,
        "cumulative_local_expert_recv_stats": None,
        "dispatch_wait_recv_cost_stats": None,
        "use_fp8": True,
        "round_scale": False,
        "use_ue8m0": False,
        "async_finish": False,
        "return_recv_hook": False,
    },
    "Buffer.low_latency_combine": {
        "x": REQUIRED,
        "topk_idx": REQUIRED,
        "topk_weights": REQUIRED,
        "handle": REQUIRED,
        "use_logfmt": False,
        "zero_copy": False,
        "async_finish": False,
        "return_recv_hook": False,
        "out": None,
        "combine_wait_recv_cost_stats": None,
    },
    "Buffer.get_low_latency_rdma_size_hint": {
        "num_max_dispatch_tokens_per_rank": REQUIRED,
        "hidden": REQUIRED,
        "num_ranks": REQUIRED,
        "num_experts": REQUIRED,
    },
    "Buffer.clean_low_latency_buffer": {
        "num_max_dispatch_tokens_per_rank": REQUIRED,
        "hidden": REQUIRED,
        "num_experts": REQUIRED,
    },
    "Buffer.get_local_buffer_tensor": {"dtype": REQUIRED, "size": None, "offset": 0, "use_rdma_buffer": False},
    "Buffer.get_next_low_latency_combine_buffer": {"handle": REQUIRED},
    "Buffer.low_latency_update_mask_buffer": {"rank_to_mask": REQUIRED, "mask": False},
    "Buffer.low_latency_query_mask_buffer": {"mask_status": REQUIRED},
    "Buffer.low_latency_clean_mask_buffer": {},
    "Buffer.set_num_sms": {"new_num_sms": REQUIRED},
    "Buffer.get_dispatch_config": {"num_ranks": REQUIRED},
    "Buffer.get_combine_config": {"num_ranks": REQUIRED},
    "Buffer.capture": {},
    "Buffer.destroy": {},
    "Buffer.get_comm_stream": {},
    "Buffer.is_sm90_compiled": {},
    "Config": {
        "num_sms": 20,
        "num_max_nvl_chunked_send_tokens": 6,
        "num_max_nvl_chunked_recv_tokens": 256,
        "num_max_rdma_chunked_send_tokens": 6,
        "num_max_rdma_chunked_recv_tokens": 256,
    },
    "Config.get_nvl_buffer_size_hint": {"hidden_bytes": REQUIRED, "num_ranks": REQUIRED},
    "Config.get_rdma_buffer_size_hint": {"hidden_bytes": REQUIRED, "num_ranks": REQUIRED},
    "EventOverlap": {"event": None, "extra_tensors": None},
    "EventOverlap.current_stream_wait": {"release_handle": False},
    "EventOverlap.__call__": {"release_handle": False},
    "EventHandle": {},
    "EventHandle.current_stream_wait": {},
    "ElasticBuffer": {
        "group": REQUIRED,
        "num_bytes": None,
        "num_cpu_bytes": 0,
        "num_max_tokens_per_rank": 0,
        "hidden": 0,
        "num_topk": 0,
        "use_fp8_dispatch": False,
        "deterministic": False,
        "allow_hybrid_mode": True,
        "allow_multiple_reduction": True,
        "prefer_overlap_with_compute": True,
        "sl_idx": 3,
        "num_allocated_qps": 0,
        "num_cpu_timeout_secs": 300,
        "num_gpu_timeout_secs": 100,
        "explicitly_destroy": False,
    },
    "ElasticBuffer.dispatch": {
        "x": REQUIRED,
        "topk_idx": None,
        "topk_weights": None,
        "cumulative_local_expert_recv_stats": None,
        "num_experts": None,
        "num_max_tokens_per_rank": None,
        "expert_alignment": None,
        "num_sms": 0,
        "num_qps": 0,
        **ELASTIC_STREAMS,
        "handle": None,
        "do_handle_copy": True,
        "do_cpu_sync": None,
        "do_expand": False,
        "do_zero_padding": False,
        "use_tma_aligned_col_major_sf": False,
    },
    "ElasticBuffer.combine": {
        "x": REQUIRED,
        "handle": REQUIRED,
        "topk_weights": None,
        "bias": None,
        "num_sms": 0,
        "num_qps": 0,
        **ELASTIC_STREAMS,
    },
    "ElasticBuffer.get_buffer_size_hint": {
        "group": REQUIRED,
        "num_max_tokens_per_rank": REQUIRED,
        "hidden": REQUIRED,
        "num_topk": 0,
        "use_fp8_dispatch": False,
    },
    "ElasticBuffer.get_theoretical_num_sms": {"num_experts": REQUIRED, "num_topk": REQUIRED},
    "ElasticBuffer.get_theoretical_num_qps": {"num_sms": REQUIRED},
    "ElasticBuffer.barrier": {"use_comm_stream": True, "with_cpu_sync": False, "sequential": False},
    "ElasticBuffer.get_comm_stream": {},
    "ElasticBuffer.get_physical_domain_size": {},
    "ElasticBuffer.get_logical_domain_size": {},
    "ElasticBuffer.capture": {},
    "ElasticBuffer.destroy": {},
    "get_physical_domain_size": {"group": REQUIRED},
    "get_logical_domain_size": {"group": REQUIRED, "allow_hybrid_mode": True},
    "HybridEPBuffer": {
        "group": REQUIRED,
        "hidden_dim": REQUIRED,
        "max_num_of_tokens_per_rank": REQUIRED,
        "num_local_experts": REQUIRED,
        "use_fp8": False,
        "num_sms_dispatch_api": None,
        "num_sms_combine_api": None,
        "num_sms_preprocessing_api": None,
        "num_blocks_permute": None,
        "num_blocks_unpermute": None,
        "load_cached_kernels": False,
        "use_shared_buffer": True,
        "enable_custom_allgather": False,
    },
    "HybridEPBuffer.dispatch_with_permute": {
        "hidden": REQUIRED,
        "topk_idx": None,
        "topk_weights": None,
        "num_of_experts_per_rank": None,
        "num_of_experts": None,
        "use_fp8": None,
        "routing_map": None,
        "probs": None,
        "scaling_factor": None,
        "num_permuted_tokens": None,
        "pad_multiple": None,
        "handle": None,
        "non_blocking": False,
        "fuse_permute_dispatch": False,
        "num_dispatched_tokens": None,
        "use_host_meta": True,
    },
    "HybridEPBuffer.combine_with_unpermute": {
        "hidden": REQUIRED,
        "probs": None,
        "handle": None,
        "pad_multiple": None,
        "fuse_unpermute_combine": False,
    },
    "hybrid_ep_buffer.indices_to_map": {
        "topk_idx": REQUIRED,
        "topk_weights": REQUIRED,
        "num_of_tokens": REQUIRED,
        "num_of_experts": REQUIRED,
    },
}
"""Parameters by name, in their order, with their defaults. Ours may have more behind them."""

ATTRIBUTES = {
    "Buffer": [
        "group",
        "group_size",
        "low_latency_mode",
        "num_nvl_bytes",
        "num_rdma_bytes",
        "num_sms",
        "rank",
        "runtime",
    ],
    "ElasticBuffer": [
        "group",
        "num_allocated_qps",
        "num_bytes",
        "num_max_tokens_per_rank",
        "num_ranks",
        "num_scaleout_ranks",
        "num_scaleup_ranks",
        "rank_idx",
    ],
    "EPHandle": [
        "channel_linked_list",
        "do_expand",
        "dst_buffer_slot_idx",
        "expert_alignment",
        "num_expanded_tokens",
        "num_experts",
        "num_max_tokens_per_rank",
        "num_recv_tokens",
        "num_recv_tokens_per_expert_list",
        "num_sms",
        "num_unaligned_recv_tokens_per_expert",
        "psum_num_recv_tokens_per_expert",
        "psum_num_recv_tokens_per_scaleup_rank",
        "recv_src_metadata",
        "token_metadata_at_forward",
        "topk_idx",
    ],
    "HybridEPBuffer": ["configurer", "group"],
    "HybridEpConfigInstance": ["hidden_dim", "max_num_of_tokens_per_rank", "num_of_experts_per_rank"],
    "EventOverlap": ["event", "extra_tensors", "hook_after_wait"],
}
"""What clients read of objects, or assign."""


def found(path: str) -> Any:
    value: Any = deep_ep
    for name in path.split("."):
        value = getattr(value, name) if hasattr(value, name) else import_module(f"{value.__name__}.{name}")
    return value


@pytest.mark.parametrize("name", [*MAIN, *HYBRID])
def test_names(name: str) -> None:
    assert hasattr(deep_ep, name)
    assert name in deep_ep.__all__


@pytest.mark.parametrize("module", SUBMODULES)
def test_names_of_submodules(module: str) -> None:
    found = import_module(f"tokenloom.compat.deep_ep.{module}")
    assert [name for name in SUBMODULES[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str) -> None:
    """By keyword and, where upstream allows it, by position."""
    has = [each for each in inspect.signature(found(path)).parameters.values() if each.name != "self"]
    wanted = SIGNATURES[path]
    assert [each.name for each in has][: len(wanted)] == list(wanted)
    assert {each.name: each.default for each in has if each.name in wanted} == wanted


@on_ranks
def test_attributes(context: RankContext) -> None:
    """Of objects as clients get them. They are plain: what a client assigns, it reads."""
    elastic = deep_ep.ElasticBuffer(context.group, num_max_tokens_per_rank=4, hidden=16, num_topk=1)
    hybrid = deep_ep.HybridEPBuffer(context.group, 16, 4, 2)
    x = torch.zeros(1, 16, dtype=torch.bfloat16, device=context.device)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=context.device)
    handle = elastic.dispatch(x, ids, torch.ones(1, 1, device=context.device), num_experts=context.num_ranks)[3]
    objects = {
        "Buffer": deep_ep.Buffer(context.group),
        "ElasticBuffer": elastic,
        "EPHandle": handle,
        "HybridEPBuffer": hybrid,
        "HybridEpConfigInstance": hybrid.configurer.buffer_config,
        "EventOverlap": deep_ep.EventOverlap(),
    }
    for name, value in objects.items():
        assert type(value) is getattr(deep_ep, name)
        missing = [each for each in ATTRIBUTES[name] if each not in {*dir(value), *vars(value)}]
        assert not missing, f"{name} has no {missing}"
    for name in ATTRIBUTES["EPHandle"]:
        setattr(handle, name, "of the client")
        assert getattr(handle, name) == "of the client"


def test_all_classes_have_attributes_here() -> None:
    """Whatever class is public is read by somebody, or has no state for clients."""
    classes = {name for name in deep_ep.__all__ if isinstance(getattr(deep_ep, name), type)}
    assert classes - set(ATTRIBUTES) == {"Config", "EventHandle"}


def test_one_class_of_events() -> None:
    """``isinstance`` must not depend on where a client imports it from."""
    utils = import_module("tokenloom.compat.deep_ep.utils")
    event = import_module("tokenloom.compat.deep_ep.utils.event")
    assert utils.EventOverlap is event.EventOverlap is deep_ep.EventOverlap
    assert utils.EventHandle is deep_ep.EventHandle


def test_values() -> None:
    assert deep_ep.topk_idx_t == torch.int64
    assert deep_ep.__version__.startswith("2.1.0+tokenloom.")
    assert deep_ep.Buffer.num_sms == 20
    assert isinstance(deep_ep.Buffer.capture(), deep_ep.EventOverlap)
    assert isinstance(deep_ep.ElasticBuffer.capture(), deep_ep.EventHandle)
    assert deep_ep.Buffer.is_sm90_compiled()


# -- config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 160])
def test_configs_for_any_number_of_ranks(num_ranks: int) -> None:
    for config in (deep_ep.Buffer.get_dispatch_config(num_ranks), deep_ep.Buffer.get_combine_config(num_ranks)):
        assert config.get_nvl_buffer_size_hint(7168 * 2, num_ranks) > 0
        assert (config.get_rdma_buffer_size_hint(7168 * 2, num_ranks) == 0) == (num_ranks <= 8)


def test_no_config_for_no_ranks() -> None:
    with pytest.raises(AssertionError, match="Unsupported number of EP ranks"):
        deep_ep.Buffer.get_dispatch_config(0)


def test_hints_grow_with_rows() -> None:
    """Megatron makes its buffer again when a hint grows."""
    config = deep_ep.Config(24, 8, 128)
    assert config.get_nvl_buffer_size_hint(2048, 8) > config.get_nvl_buffer_size_hint(1024, 8)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_sms": 0},
        {"num_max_nvl_chunked_send_tokens": 256},
        {"num_max_nvl_chunked_recv_tokens": 6},
        {"num_max_rdma_chunked_send_tokens": 300},
        {"num_max_rdma_chunked_recv_tokens": -1},
    ],
)
def test_config_checks(bad: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match=f"Config: {next(iter(bad))}|num_max_nvl_chunked_send_tokens"):
        deep_ep.Config(**bad)


# -- events -----------------------------------------------------------------------------------------------------


def test_events_without_cuda() -> None:
    event = deep_ep.EventOverlap(deep_ep.EventHandle(), extra_tensors=(torch.ones(1),))
    called = []
    event.hook_after_wait = lambda: called.append(1)
    event.current_stream_wait()
    event.current_stream_wait()
    assert called == [1], "the hook runs once"
    assert event.event is not None
    assert event.extra_tensors is not None
    event.current_stream_wait(release_handle=True)
    assert (event.event, event.extra_tensors) == (None, None)


def test_waiting_for_nothing_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no event to wait for"):
        deep_ep.EventOverlap().current_stream_wait()


def test_events_around_blocks() -> None:
    """The wait comes at the end of the block, and only if there is an event."""
    event = deep_ep.EventOverlap(deep_ep.EventHandle())
    order = []
    event.hook_after_wait = lambda: order.append("waited")
    with event(release_handle=True):
        order.append("inside")
    assert order == ["inside", "waited"]
    assert event.event is None
    with deep_ep.EventOverlap():
        pass


def test_errors_are_what_clients_may_catch() -> None:
    """Upstream's are assertions of Python and RuntimeErrors of C++."""
    assert issubclass(BadCall, AssertionError)
    assert issubclass(BadCall, RuntimeError)
