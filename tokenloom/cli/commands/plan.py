"""``tokenloom plan``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tokenloom.cli.options import (
    AnyTopK,
    Hidden,
    JsonFile,
    NumExperts,
    PlotFile,
    TokensList,
    choice_option,
    existing_file_option,
    number_option,
    numbers,
    whole_option,
)
from tokenloom.cli.terminal import console

DEFAULT_TOKENS = (128, 4096)
DEFAULT_TOP_K = 8
MOST_MIB = 2**30
"""Far more than a GPU has."""


def plan(
    nodes: Annotated[int | None, whole_option("--nodes", "Show this many nodes in detail, too.")] = None,
    ranks_per_node: Annotated[int, whole_option("--ranks-per-node", "GPUs of a node, each with its NIC.")] = 8,
    tokens: TokensList = None,
    hidden: Hidden = 7168,
    num_experts: NumExperts = 256,
    top_k: AnyTopK = None,
    dtype: Annotated[
        str, choice_option("--dtype", ("fp8", "bf16"), "Dtype of dispatched rows; combined rows are BF16.")
    ] = "fp8",
    node_limit: Annotated[
        int | None, whole_option("--node-limit", "Most nodes that the router lets a token choose. Default: no limit.")
    ] = None,
    nic_gbytes_per_s: Annotated[
        float | None,
        number_option(
            "--nic-gbytes-per-s", "Rate of a GPU's NIC each way. Default: 46 and 45, as fitted to 400 Gb/s.", above=0
        ),
    ] = None,
    nvlink_gbytes_per_s: Annotated[
        float | None,
        number_option(
            "--nvlink-gbytes-per-s", "Rate of a GPU's NVLinks each way. Default: 347, as measured on an H200.", above=0
        ),
    ] = None,
    put_us: Annotated[
        float | None,
        number_option("--put-us", "Time of a put: about 0.5 if a thread of the host makes them. Default: 0.", least=0),
    ] = None,
    constants_file: Annotated[
        Path | None, existing_file_option("--constants", "Read the constants of a cluster from this file.")
    ] = None,
    routing_file: Annotated[
        Path | None, existing_file_option("--routing", "Count the rows of measured topk_ids [W, T, K], .npy or .pt.")
    ] = None,
    budget: Annotated[
        float | None,
        number_option(
            "--budget",
            "MiB of a GPU for rows from other nodes. Also shows the memory that backends hold.",
            least=0,
            most=MOST_MIB,
        ),
    ] = None,
    plot_file: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Model what dispatch and combine take between nodes, from 8 to 2048 ranks, beside published figures."""
    rates = {"--nic-gbytes-per-s": nic_gbytes_per_s, "--nvlink-gbytes-per-s": nvlink_gbytes_per_s, "--put-us": put_us}
    _require_alone("--constants", constants_file, rates)
    in_routing = {"--nodes": nodes, "--tokens": tokens, "--top-k": top_k, "--node-limit": node_limit}
    _require_alone("--routing", routing_file, in_routing | {"--plot": plot_file})
    if budget is not None and nodes is None and routing_file is None:
        raise typer.BadParameter(f"is {budget:g}, but it is for one cluster; give --nodes too", param_hint="--budget")

    from tokenloom.bench.plan import PlanProblem, run_plan
    from tokenloom.tune.network.constants import FITTED, read_constants, with_rates
    from tokenloom.tune.network.routing_file import read_routing

    constants = read_constants(constants_file) if constants_file else FITTED
    constants = with_rates(constants, nic_gbytes_per_s, nvlink_gbytes_per_s, put_us)
    routing = read_routing(routing_file, num_experts) if routing_file else None
    top_k = routing[0].shape[1] if routing else top_k or DEFAULT_TOP_K
    run_plan(
        console(),
        PlanProblem(hidden, num_experts, top_k, dtype, ranks_per_node, node_limit),
        numbers("--tokens", tokens) or DEFAULT_TOKENS,
        constants,
        num_nodes=nodes,
        routing=routing,
        budget_mib=budget,
        command=sys.argv[1:],
        json_file=json_file,
        plot_file=plot_file,
    )


def _require_alone(option: str, file: Path | None, others: Mapping[str, object]) -> None:
    """Refuse options whose values the file has."""
    given = [name for name, value in others.items() if value is not None]
    if file is not None and given:
        said = f"is {file}, which says what {', '.join(given)} would; leave out one of them"
        raise typer.BadParameter(said, param_hint=option)
