"""microbench/balance_model.py predicts from splits what can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from microbench import balance_model
from microbench.balance_model import (
    default_table,
    judge,
    pulls_by_rank,
    pulls_us,
    rows_by_origin,
    rows_per_pull,
    rows_us,
)
from tokenloom.ops.split_batch import split_batch


def test_rows_per_pull_by_hand() -> None:
    """An expert in BF16 has 88.1 MB, which take 254 us at 347 GB/s; its 88.1 MFLOP a row take 0.126 us."""
    assert rows_per_pull(2, 700.0) == 2017
    assert pulls_us("training", 1) == pytest.approx(3 * 88.08e6 / 347e9 * 1e6, rel=1e-3)
    assert pulls_us("training", 1) == pytest.approx(rows_us("training", 2017), rel=1e-3)
    assert rows_per_pull(1, 1000.0) == 1441
    assert pulls_us("inference", 1) == pytest.approx(rows_us("inference", 1441), rel=1e-3)


def test_a_batch_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts of rank 0 have all 90 routes of three ranks. Each helper pulls one of them, so rank 0 sends two. A
    row takes 1 us, and an expert 8: whoever waits needs 16 us more, and rank 0 hides them behind rows of its own."""
    monkeypatch.setattr(balance_model, "rows_us", lambda kind, rows: float(rows))
    monkeypatch.setattr(balance_model, "pulls_us", lambda kind, experts: 8.0 * experts)
    table, counts = default_table(6, 3, 1), np.zeros((3, 6), dtype=np.int64)
    assert table == [[0, 1, -1], [2, 3, -1], [4, 5, -1]]
    counts[:, 0], counts[:, 1] = 20, 10
    split = split_batch(counts, table)
    assert rows_by_origin(counts, table, split) == ([30, 0, 0], [0, 30, 30])
    assert pulls_by_rank(table, split) == ([0, 1, 1], [2, 0, 0])
    found = judge("inference", counts, table, split)
    assert (found.before, found.after, found.pulls, found.sends) == (3, 1, 1, 2)
    assert (found.off_us, found.on_us, found.hidden_us) == pytest.approx((90, 46, 46))
    counts[1, 2], counts[2, 4] = 20, 20
    found = judge("inference", counts, table, split_batch(counts, table))
    assert (found.off_us, found.on_us) == pytest.approx((90, 44 + 16))
    assert found.hidden_us == pytest.approx(44), "helpers have 20 rows of their own to compute meanwhile"


def test_a_batch_that_is_not_split() -> None:
    counts = np.full((2, 4), 5, dtype=np.int64)
    table = default_table(4, 2, 1)
    found = judge("training", counts, table, split_batch(counts, table))
    assert found.before == found.after == 1
    assert found.off_us == found.on_us == found.hidden_us == balance_model.rows_us("training", 20)
