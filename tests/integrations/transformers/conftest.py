"""Groups of ranks with transformers, and models on disk. All of it needs the extra ``clients``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import NUM_GPUS
from tests.integrations.transformers import models
from tokenloom.runtime.processes import RankPool

IMPORTED = "transformers.modeling_utils"
"""By nearly all tests, which takes seconds."""

os.environ["HF_HUB_OFFLINE"] = "1"  # for ranks and scripts, which read it as they import transformers


def why_not() -> str | None:
    """Why tests with transformers cannot run here."""
    cure = "the extra 'clients' has it"
    if util.find_spec("transformers") is None:
        return f"transformers is not installed; {cure}"
    if util.find_spec("transformers.distributed") and util.find_spec("transformers.distributed.expert_parallel"):
        return None
    return f"transformers is too old; {cure}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    mark = pytest.mark.skip(reason=reason) if reason else pytest.mark.imports(IMPORTED)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(mark)


def _pools() -> list[Any]:
    gpu = [pytest.mark.gpu]
    if not NUM_GPUS:
        cpu = [pytest.param(("cpu", n), id=f"cpu{n}") for n in (2, 4)]
        skip = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
        return [*cpu, pytest.param(("cuda", 2), id="cuda", marks=[*gpu, skip])]
    # transformers puts its ranks on GPUs wherever there are some.
    return [pytest.param(("cuda", n), id=f"cuda{n}", marks=gpu) for n in (2, 4) if n <= NUM_GPUS]


@pytest.fixture(scope="session", params=_pools())
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    device, num_ranks = request.param
    with RankPool(num_ranks, device) as made:
        yield made


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, RankPool], Path]:
    """Gives the model of a family on disk.

    On GPUs it has one layer in bfloat16: rounding before a later router would change its choice.
    """
    folders = tmp_path_factory.mktemp("models")

    def folder_of(family: str, pool: RankPool) -> Path:
        on_gpus = pool.device == "cuda"
        folder = folders / f"{family}-{pool.device}"
        if not folder.exists():
            models.save(family, folder, 1 if on_gpus else 2, torch.bfloat16 if on_gpus else torch.float32)
        return folder

    return folder_of
