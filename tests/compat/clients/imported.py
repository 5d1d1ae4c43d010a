"""Imports Megatron-Core behind tokenloom's ``deep_ep``: ranks are forks of a process that has done so, which takes
seconds.
"""

from __future__ import annotations

from importlib import import_module

from tokenloom.compat import install

install()
import_module("megatron.core.jit").disable_jit_fuser()  # its small functions, which each rank would compile for long
for name in ("transformer_config", "moe.moe_layer", "moe.moe_utils", "moe.fused_a2a"):
    import_module(f"megatron.core.transformer.{name}")
import_module("megatron.core.models.gpt.moe_module_specs")
