"""Texts below tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COMM = "p50 and p99 are over samples, each of its slowest rank. 1 GB is 1e9 bytes."
COMM_FLOOR = (
    "Floor: the tokens' values that leave the busiest rank, at {link:,.0f} GB/s, which the links of an H200 carry."
)
SKEW = "v: MaxVio of the routing, the largest expected load of an expert over the mean, less 1."
SPARE = "spare: with replicas of hot experts in as many slots more on each rank, planned from another batch."
BATCH = "batch: the slots are empty, and each batch is split over the ranks (balance='batch')."
COMM_BATCH = (
    "Of rows with batch, a dispatch begins with an exchange of counts, which its time includes. Nobody pulls weights "
    "here, which is the part of layers. Combines sum per rank, as those beside them."
)
FULLEST = "Fullest rank: routes of the rank with most, over the mean of all ranks."
COMM_CLOCKS = {
    "cpu": "wall, the host's",
    "cuda": "events around one call, or graph, a replayed CUDA graph of {calls} calls",
}
COMM_KINDS = {
    "calls": "Calls: physical: bytes that leave the busiest rank over a link, those that it hands on included; "
    "logical: bytes received, those that stay on their rank included; per p50. Names end in the clock: {clock}.",
    "eager": "Eager pairs: wall clock of a dispatch and its combine, in a loop of {pairs} pairs without a graph; "
    "host: until one call returns, on a device that is idle.",
    "halves": "Halves: p50 of sending, a GEMM, and receiving; exposed: p50 without the GEMM alone; beside it the "
    "call in one piece with the GEMM behind it. dispatch+combine sends both before the GEMM, as two micro-batches do.",
}
"""By kind of row."""


def about_routings(setups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Explain what rows of these setups say of their routings; nothing where all are even and without a placement."""
    skewed = any(each["max_vio"] for each in setups)
    placed = [each for each in setups if each.get("spare_slots") is not None]
    balanced = any(each.get("balance") for each in placed)
    replicated = any(not each.get("balance") for each in placed)
    texts = [SKEW] * skewed + [SPARE] * replicated + [BATCH] * balanced
    return [*texts, FULLEST] if texts else []


MEGA = (
    "p50 of one call, of the slowest rank of each sample, in a replayed CUDA graph of {calls}; steady: the same in "
    "replays without a pause, where the GPU is at its power limit; events: p50 around one call. TFLOP/s: of all "
    "ranks' routes and shared experts, per rank. HBM: the weights of the experts that have a token, on the rank "
    "that has most such experts; NVLink: what leaves the busiest rank, a row for each route there and back; both "
    "per p50. Floor: the largest of those weights at {hbm:,.0f} GB/s, the arithmetic of the busiest rank at "
    "{tflops:,.0f} TFLOP/s, and what leaves the busiest rank at {link:,.0f} GB/s. Taken: memory of calls of most "
    "tokens beside weights. Stages: of the slowest rank of each, in a graph of one call. Where few tokens leave "
    "experts out, numbers are of {draws} routings."
)
MEGA_COLD = "Cold: L2 was overwritten before each sample, so weights come from HBM."
MEGA_OTHERS = "GB/s count for all what ours moves. Times ours: a layer's time over ours, above 1 where ours is faster."

TRAIN_TIMES = (
    "p50 and p99 of the slowest rank of each sample; times include the router. Inference: forward without gradients. "
    "TFLOP/s: of the experts' GEMMs, for each rank that computes."
)
TRAIN_SPARE = "Its backward sums the gradients of an expert's replicas at their owner, as before an optimizer's step."
TRAIN_BATCH = (
    "It pulls experts in forward and again in backward, and brings their gradients home. Its strategy is that of the "
    "layer beside it."
)
TRAIN_BASELINES = (
    "{rival} rival: torch alone (sort by expert, all_to_all_single of one row per route, grouped_mm, SwiGLU, and "
    "back). Local: one rank's tokens and experts, without a network. One rank: all tokens and all experts, while the "
    "other ranks are idle. Both use torch with this layer's GEMMs and SwiGLU. All take turns with this layer."
)
TRAIN_EXPOSED = "Exposed: this layer less the baseline, and in % of this layer. Scaling: one / W by this layer."
TRAIN_CHECK = (
    "Reference: dense, float32, all tokens. Relative: norm of the difference by the reference's; at most "
    "{limit:.3g}, for {reason}. Max diff: at most {largest:.3g} of max |ref|, which a "
    "single lost token exceeds."
)
TRAIN_CPU = "ranks on CPUs share cores and memory: what is exposed here is not the network's time alone"
TRAIN_EQUALITY = (
    "On CPUs this comparison is about equal numbers, not about speed. There, backend {backend} is plain torch over "
    "gloo, and each of its calls begins with a handshake of all ranks. The kernels that make tokenloom fast run on "
    "Hopper GPUs."
)

TUNE = (
    "With GEMM: dispatch and the GEMM of gates and ups; the GEMM of outputs and combine. Alone: the transfer "
    "without it. Gradient: the transfer backward. Score: with GEMM + gradient. GB/s: bytes that leave the busiest "
    "rank, by the time of the transfer alone; 1 GB is 1e9 bytes."
)

NETWORK_LINKS = (
    "Links: the shortest median round trip of 8 bytes, and the best rate each way (1 GB is 1e9 bytes), of {turns} "
    "turns. A link fails below {slow:.0%} of the median rate of its kind. It also fails with a ping above both "
    "{late:g} times the median of its kind and that median plus {late_us:,.0f} µs."
)

PLAN = (
    "node, rank, route: a row for each node, rank or route of a token on other nodes. Times are of the busiest rank: "
    "start + the longest of NIC, NVLink and puts + a share of the shorter of NIC and NVLink. binds: the largest of "
    "the four; in tables that compare sizes, for node. others' best: the fastest published figure. staging: memory of "
    "a GPU for rows from other nodes, of two calls in turn; --budget shows all that backends hold."
)
PLAN_EXTRAPOLATED = (
    "* beyond the published figures in: {words}. They are of hidden {hidden}, top-{top_k} and {ranks_per_node} ranks "
    "a node; in low latency of 128 tokens on 16 to 256 ranks, in high throughput of 4096 to 8192 tokens on 16 to 64 "
    "ranks."
)
PLAN_PREDICTED = (
    "Nobody publishes low latency with a row per (token, node): those times are predictions, and its hop over NVLink "
    "takes {least:g} to {most:g} µs more, by a guess."
)
