"""What comes with dispatch and combine between nodes by kernels alone, on the emulator: gradients, other rows, weights."""

from __future__ import annotations

from typing import Any

import pytest

from tests.comm import test_beside, test_gradients
from tests.support import emulator
from tests.support.cases import BETWEEN_NODES, FP32, case_params
from tokenloom.plan import LAYOUTS

pytestmark = pytest.mark.skipif(emulator.CXX is None, reason="no g++")
each_way = pytest.mark.parametrize("way", BETWEEN_NODES)
EXACT = [case for case in test_gradients.EXACT if case not in ("hidden7", "fp64")]


@each_way
@pytest.mark.parametrize("case", case_params(EXACT))
def test_backward_is_the_other_operation(way: str, case: Any) -> None:
    emulator.ranks(4).run(test_gradients.check_exact, way, case)


@each_way
def test_gradient_of_received_weights(way: str) -> None:
    emulator.ranks(4).run(test_gradients.check_received_weights, way)


@each_way
@pytest.mark.parametrize(
    ("layout", "options"), [each for each in test_gradients.VARIANTS if "mode" not in each.values[1]]
)
def test_equals_dense(way: str, layout: str, options: dict[str, Any]) -> None:
    emulator.ranks(4).run(test_gradients.check_dense, way, layout, options, FP32)


@each_way
@pytest.mark.parametrize("layout", ["token", "slots"])
def test_any_tokens(way: str, layout: str) -> None:
    emulator.ranks(4).run(test_gradients.check_any_tokens, way, layout)


@each_way
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dispatch_again(way: str, layout: str) -> None:
    """The rows of exact sizes and of bounded ones lie where those of the dispatch do."""
    for sizes in ("exact", "bounded"):
        options: dict[str, Any] = {"sizes": sizes} if layout != "slots" else {}
        if (layout, sizes) == ("expert", "bounded"):
            options["capacity"] = 96
        emulator.ranks(4).run(test_beside.check_dispatch_again, way, layout, options)


@each_way
@pytest.mark.parametrize("layout", ["expert", "slots"])
def test_weights_of_routes_come_home(way: str, layout: str) -> None:
    emulator.ranks(4).run(test_beside.check_combine_weights, way, layout, {})


@pytest.mark.parametrize("layout", ["expert", "slots"])
def test_weights_that_come_later(layout: str) -> None:
    emulator.ranks(4).run(test_beside.check_reweighted, "padded", layout, "absent")


@pytest.mark.parametrize("layout", ["token", "rank"])
def test_other_weights_of_tokens(layout: str) -> None:
    emulator.ranks(4).run(test_beside.check_other_weights, "padded", layout, "exact")


@each_way
@pytest.mark.parametrize("layout", ["token", "expert"])
def test_bias(way: str, layout: str) -> None:
    emulator.ranks(4).run(test_beside.check_bias, way, layout, 2)


@each_way
@pytest.mark.parametrize("layout", ["token", "expert"])
def test_packed_scales(way: str, layout: str) -> None:
    emulator.ranks(4).run(test_beside.check_packed, way, layout, 2)


@each_way
@pytest.mark.parametrize("layout", ["expert", "slots"])
def test_source_tokens(way: str, layout: str) -> None:
    emulator.ranks(4).run(test_beside.check_source_tokens, way, layout)


@each_way
def test_unused_ids_marked(way: str) -> None:
    emulator.ranks(4).run(test_beside.check_unused_ids, way)
