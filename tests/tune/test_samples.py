"""Routings that are drawn as uneven as asked for."""

from __future__ import annotations

import pytest
import torch

import tokenloom as tl
from tokenloom.comm.expert_stats import max_vio
from tokenloom.tune.samples import draw_topk_ids, popularity


@pytest.mark.parametrize(
    ("num_experts", "top_k", "wanted"), [(256, 8, 0.2), (256, 8, 1.0), (256, 8, 4.0), (256, 8, 25.0), (16, 2, 1.0)]
)
def test_drawn_loads_have_the_max_vio(num_experts: int, top_k: int, wanted: float) -> None:
    """The favourite of all ranks gets as much as it should, within 6%: the number of its 1,000 routes or more varies
    by up to 3%. A token never draws an expert twice."""
    loads = torch.zeros(num_experts, dtype=torch.int64)
    for rank in range(4):
        ids = draw_topk_ids(rank, 8192, num_experts, top_k, wanted)
        assert (ids.sort().values.diff() > 0).all()
        loads += ids.flatten().bincount(minlength=num_experts)
    favourite = loads[popularity(num_experts, top_k, wanted).argmax()]
    assert float(favourite / loads.double().mean()) == pytest.approx(1 + wanted, rel=0.06)
    assert float(max_vio(loads)) == pytest.approx(wanted, abs=0.1 + 0.06 * wanted), "nobody else gets more"


def test_popularity() -> None:
    """Its logarithms have the quantiles of a normal distribution, in no order; 0 makes all alike."""
    chances = popularity(256, 8, 1.0)
    logs = chances.log().sort().values
    places = (torch.arange(256, dtype=torch.float64) + 0.5) / 256
    quantiles = torch.special.ndtri(places)
    sigma = logs.std() / quantiles.std()
    torch.testing.assert_close(logs, sigma * (quantiles - quantiles.max()))
    hot = chances.topk(32).indices
    assert len({int(each) // 32 for each in hot}) > 5, "hot experts are on many of eight ranks"
    assert popularity(8, 2, 0.0).tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            31.0,
            r"max_vio is 31, expected less than 31: with top-8 of 256 experts, no expert can have 32 times",
        ),
        (-0.5, "max_vio is -0.5, expected a number of at least 0"),
        (float("nan"), "max_vio is nan"),
        (float("inf"), "max_vio is inf"),
    ],
)
def test_what_no_routing_can_be(wanted: float, said: str) -> None:
    """It says how uneven a routing can be."""
    with pytest.raises(tl.InvalidArgument, match=said):
        draw_topk_ids(0, 1, 256, 8, wanted)
