"""The rules that ``python -m tests.mutations`` breaks, one at a time, and the tests that must notice."""

from __future__ import annotations

from tests.mutations.rules import (
    beside,
    cache,
    check_network,
    collective,
    comm,
    compat,
    faults,
    forms,
    gin,
    host,
    inference,
    inputs,
    inside_nodes,
    integrations,
    kernels,
    masks,
    network,
    nodes,
    ops,
    reference,
    runtime,
    training,
    usual,
)

MUTATIONS = (
    ops.MUTATIONS
    + reference.MUTATIONS
    + collective.MUTATIONS
    + comm.MUTATIONS
    + beside.MUTATIONS
    + faults.MUTATIONS
    + compat.MUTATIONS
    + usual.MUTATIONS
    + runtime.MUTATIONS
    + host.MUTATIONS
    + masks.MUTATIONS
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
)
