"""The cost model: what it predicts, which term binds, and the memory for rows that come in."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tokenloom.errors import InvalidArgument
from tokenloom.tune.network.constants import FITTED, with_rates
from tokenloom.tune.network.cost import (
    MIB,
    cost,
    puts_of,
    regime_of,
    require_budget,
    row_bytes,
    staging_bytes,
)
from tokenloom.tune.network.traffic import Cluster, Load, expected

HIDDEN = 7168


def us(nodes: int, num_tokens: int, dtype: str, row_per: str = "node") -> float:
    load = expected(Cluster(nodes, 8, 256, 8), row_per, num_tokens)
    return cost(FITTED, regime_of(num_tokens), load, row_bytes(dtype, HIDDEN), 0).time_us


@pytest.mark.parametrize(("nodes", "fp8", "bf16"), [(2, 51, 70), (4, 86, 138), (8, 125, 215), (16, 156, 274)])
def test_low_latency_with_a_row_per_node(nodes: int, fp8: float, bf16: float) -> None:
    """128 tokens: the targets of backend "network", which it is to beat or to explain."""
    assert us(nodes, 128, "fp8") == pytest.approx(fp8, abs=0.6)
    assert us(nodes, 128, "bf16") == pytest.approx(bf16, abs=0.6)


@pytest.mark.parametrize(
    ("nodes", "fp8", "bf16"),
    [
        (2, 0.76, 1.44),
        (4, 1.92, 3.68),
        (8, 3.22, 6.20),
        (16, 4.22, 8.14),
        (32, 4.84, 9.34),
        (64, 5.15, 9.95),
        (128, 5.32, 10.27),
        (256, 5.40, 10.43),
    ],
)
def test_high_throughput_with_a_row_per_node(nodes: int, fp8: float, bf16: float) -> None:
    """4096 tokens, milliseconds. It saturates: no token sends more than top-k rows."""
    assert us(nodes, 4096, "fp8") / 1e3 == pytest.approx(fp8, abs=0.006)
    assert us(nodes, 4096, "bf16") / 1e3 == pytest.approx(bf16, abs=0.006)


@pytest.mark.parametrize(
    ("nic_rows", "nvlink_rows", "puts", "binds", "time_us"),
    [
        (45, 347, 0, "start", 40 + 1 + 0.1),
        (45_000, 347, 10, "NIC", 40 + 1000 + 0.1),
        (45_000, 694_000, 10, "NVLink", 40 + 2000 + 100),
        (45_000, 347_000, 3000, "puts", 40 + 1500 + 100),
    ],
)
def test_the_longest_term_binds(nic_rows: float, nvlink_rows: float, puts: float, binds: str, time_us: float) -> None:
    """By hand, for rows of 1000 bytes: the longest of NIC, NVLink and puts counts, and 0.1 of the shorter transfer."""
    found = cost(with_rates(FITTED, put_us=0.5), "high_throughput", Load(0, nic_rows, nvlink_rows), 1000, puts)
    assert (found.binds, found.time_us) == (binds, pytest.approx(time_us))


def test_rates_are_those_that_are_given() -> None:
    """In both regimes, and the origin of the constants says so."""
    found = with_rates(FITTED, nic_gbytes_per_s=23.0, nvlink_gbytes_per_s=160.0, put_us=0.5)
    assert {found.low_latency.nic_gbytes_per_s, found.high_throughput.nic_gbytes_per_s} == {23.0}
    assert (found.nvlink_gbytes_per_s, found.low_latency.put_us, found.high_throughput.put_us) == (160.0, 0.5, 0.5)
    assert found.low_latency.base_us == FITTED.low_latency.base_us
    assert found.where.endswith("nic_gbytes_per_s, put_us, nvlink_gbytes_per_s as given")
    assert with_rates(FITTED) == FITTED


def test_puts_are_few_where_rows_are_packed() -> None:
    """One for each other node and piece. Otherwise each row is one: 896 of them, with a thread of 0.5 µs, bind."""
    cluster = Cluster(8, 8, 256, 8)
    load = expected(cluster, "route", 128)
    assert puts_of(cluster, "node", "low_latency", load) == 7
    assert puts_of(cluster, "node", "high_throughput", load) == 28
    assert puts_of(cluster, "route", "low_latency", load) == load.nic_rows == 896
    found = cost(with_rates(FITTED, put_us=0.5), "low_latency", load, row_bytes("fp8", HIDDEN), 896)
    assert found.binds == "puts"


def test_bytes_of_rows() -> None:
    """BF16, and FP8 with a float32 scale for 128 values; other widths have no scales."""
    assert (row_bytes("bf16", 7168), row_bytes("fp8", 7168)) == (14336, 7392)
    with pytest.raises(InvalidArgument, match="hidden is 100, expected a multiple of 128"):
        row_bytes("fp8", 100)


def test_staging_has_a_place_for_every_row() -> None:
    """8 nodes, 4096 tokens, BF16: 411 MB, for dispatch and combine, for two calls in turn."""
    cluster = Cluster(8, 8, 256, 8)
    assert staging_bytes(cluster, "node", 4096, "bf16", HIDDEN) == 2 * 2 * 7 * 4096 * 14336
    assert staging_bytes(cluster, "node", 4096, "bf16", HIDDEN) / 4 == pytest.approx(411e6, rel=1e-3)
    assert staging_bytes(cluster, "node", 4096, "fp8", HIDDEN) == 2 * 7 * 4096 * (7392 + 14336)
    assert staging_bytes(cluster, "rank", 128, "bf16", HIDDEN) == 2 * 2 * 56 * 128 * 14336
    assert staging_bytes(cluster, "route", 128, "bf16", HIDDEN) == 2 * 2 * 56 * 4 * 128 * 14336, "4 experts a rank"
    assert staging_bytes(replace(cluster, num_nodes=1), "node", 4096, "bf16", HIDDEN) == 0


@pytest.mark.parametrize("budget_mib", [1500.0, 100.0, 0.05])
def test_a_budget_that_is_exceeded_says_what_fits(budget_mib: float) -> None:
    """Each setting that the message names fits, and the next larger one does not."""
    cluster, budget = Cluster(8, 8, 256, 8), budget_mib * MIB
    with pytest.raises(InvalidArgument) as refused:
        require_budget(cluster, 4096, "bf16", HIDDEN, budget)
    said = str(refused.value)
    assert "need 1,568.0 MiB" in said
    ways = dict(re.findall(r"--(\w+) (\w+)", said))
    assert ways["budget"] == "1568"
    assert ("dtype" in ways) == (budget_mib == 1500.0)
    assert ("nodes" in ways) == (budget_mib == 1500.0)
    assert ("tokens" in ways) == (budget_mib > 1)

    def check(nodes: int = 8, tokens: int = 4096, dtype: str = "bf16", budget: float = budget_mib) -> None:
        require_budget(Cluster(nodes, 8, 256, 8), tokens, dtype, HIDDEN, budget * MIB)

    for name, value in ways.items():
        if name == "dtype":
            check(dtype=value)
            continue
        check(**{name: int(value)})
        with pytest.raises(InvalidArgument):
            check(**{name: int(value) + (-1 if name == "budget" else 1)})
