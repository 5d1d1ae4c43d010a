"""What is public: these modules and these names. Everything else may change without a word."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

ERRORS = [
    "BackendUnavailable",
    "CapacityOverflow",
    "CommunicatorBroken",
    "DeviceMismatch",
    "DtypeMismatch",
    "ImplausibleRates",
    "InvalidArgument",
    "InvalidExpertId",
    "KernelCompileError",
    "NotDifferentiable",
    "PeerError",
    "PeerTimeout",
    "PlanMismatch",
    "ShapeMismatch",
    "TokenloomError",
]
PUBLIC = {
    "tokenloom": [
        *ERRORS,
        "Activation",
        "BalanceStats",
        "Communicator",
        "DispatchOut",
        "ExpertParallelMoE",
        "ExpertStats",
        "MegaMoE",
        "MovingExperts",
        "Pending",
        "Placement",
        "Routed",
        "RoutedExperts",
        "Router",
        "Strategy",
        "WeightLayout",
        "FourBits",
        "MXFP4",
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
    ],
    "tokenloom.errors": ERRORS,
    "tokenloom.reference": [
        "Routed",
        "combine",
        "combine_weights",
        "dispatch",
        "fused_layer",
        "moe",
        "place",
        "quantize_fp8",
        "split",
        "sum_slots",
    ],
    "tokenloom.tune": ["MeasuredRates", "Profile", "measure_rates", "profile"],
    "tokenloom.compat": ["install"],
    "tokenloom.compat.deep_ep": [
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
    ],
    "tokenloom.integrations.transformers": ["describe", "keep_four_bits", "place_experts", "register"],
    "tokenloom.compat.deep_gemm": [
        "SM90SymmBuffer",
        "SymmBuffer",
        "fp8_fp4_mega_moe",
        "fp8_mega_moe",
        "get_num_sms",
        "get_symm_buffer_for_mega_moe",
        "get_symm_buffer_for_sm90_mega_moe",
        "mega_moe_pre_dispatch_sm90",
        "per_block_cast_to_fp8",
        "per_token_cast_to_fp8",
        "set_num_sms",
        "set_pdl",
        "testing",
        "transform_sf_into_required_layout",
        "transform_weights_for_mega_moe_sm90",
        "transform_weights_for_mega_moe_sm90_fp4",
        "utils",
    ],
}
"""Public modules, as the docstring of the package lists them, and their public names."""
NEEDS = {"tokenloom.integrations.transformers": "transformers"}
"""Packages without which a public module is an error."""


def public_module(name: str) -> ModuleType:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    return import_module(name)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name: str) -> None:
    """A name that goes, or comes, is a decision, and a line of the changelog."""
    module = public_module(name)
    assert sorted(module.__all__) == sorted(PUBLIC[name])
    assert all(hasattr(module, each) for each in PUBLIC[name])


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    """Classes and their public methods, functions, modules."""
    module = public_module(name)
    assert inspect.getdoc(module)
    values = {each: getattr(module, each) for each in PUBLIC[name]}
    for kind in [value for value in values.values() if inspect.isclass(value)]:
        own = {f"{kind.__name__}.{each}": member for each, member in vars(kind).items() if not each.startswith("_")}
        values |= {each: member for each, member in own.items() if callable(member) or isinstance(member, property)}
    bare = [
        each
        for each, value in values.items()
        if not isinstance(value, str | torch.dtype) and not inspect.getdoc(value)
    ]
    assert bare == []


def test_the_package_says_what_is_public() -> None:
    listed = re.findall(r"``(tokenloom[\w.]*)``", import_module("tokenloom").__doc__ or "")
    assert sorted(listed) == sorted(PUBLIC)


def python_of(path: Path) -> str:
    """A file of Python, or the blocks of Python in a document."""
    if path.suffix == ".py":
        return path.read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_users_are_shown_public_names_alone(path: Path) -> None:
    tree = ast.parse(python_of(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = {each.name for each in node.names if each.name.partition(".")[0] == "tokenloom"}
            assert modules <= set(PUBLIC)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tokenloom":
            names = PUBLIC.get(node.module or "", [])
            submodules = [each for each in PUBLIC if each.startswith(f"{node.module}.")]
            for each in node.names:
                assert each.name in names or f"{node.module}.{each.name}" in submodules
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tl":
            assert node.attr in PUBLIC["tokenloom"]
