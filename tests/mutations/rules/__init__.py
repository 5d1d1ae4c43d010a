"""The rules that ``python -m tests.mutations`` breaks, one at a time, and the tests that must notice."""

from __future__ import annotations

from tests.mutations.rules import (
    balance,
    cache,
    check_network,
    collective,
    comm,
    compat,
    faults,
    followups,
    forms,
    gin,
    glances,
    host,
    inference,
    inputs,
    inside_nodes,
    integrations,
    kernels,
    kinds,
    masks,
    moves,
    network,
    nodes,
    ops,
    placement,
    reference,
    replicas,
    runtime,
    training,
)

MUTATIONS = (
    ops.MUTATIONS
    + reference.MUTATIONS
    + collective.MUTATIONS
    + comm.MUTATIONS
    + followups.MUTATIONS
    + faults.MUTATIONS
    + compat.MUTATIONS
    + kinds.MUTATIONS
    + glances.MUTATIONS
    + runtime.MUTATIONS
    + host.MUTATIONS
    + masks.MUTATIONS
    + placement.MUTATIONS
    + balance.MUTATIONS
    + training.MUTATIONS
    + forms.MUTATIONS
    + inference.MUTATIONS
    + inputs.MUTATIONS
    + integrations.MUTATIONS
    + kernels.MUTATIONS
    + cache.MUTATIONS
    + network.MUTATIONS
    + nodes.MUTATIONS
    + inside_nodes.MUTATIONS
    + gin.MUTATIONS
    + check_network.MUTATIONS
    + replicas.MUTATIONS
    + moves.MUTATIONS
)
