"""Lets tests of backend "nvlink" run on the emulator.

python -m pytest -p tests.support.emulator.plugin -m "" tests/comm [--seed 2] [--not-eager]
"""

from __future__ import annotations

import pytest

from tests.support import emulator

emulator.ON = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=1, help="of the order in which everything happens")
    parser.addoption("--not-eager", action="store_true", help="no plan is small, and no slots are sparse")


def pytest_configure(config: pytest.Config) -> None:
    emulator.SEED = config.option.seed
    if config.option.not_eager:
        from tokenloom.backends.peers import buffers

        buffers.EAGER_ROWS, buffers.SLOTS_ROOM = 0, float("inf")
