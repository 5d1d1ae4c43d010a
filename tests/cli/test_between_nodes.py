"""What ``tokenloom doctor`` says of other nodes: on hosts that this one is not, with cards that it does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_examination import shown
from tokenloom.backends.gin import availability
from tokenloom.cli import between_nodes, examination


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for cards, where no plugin is named."""
    monkeypatch.setattr(availability, "RDMA_CARDS", tmp_path)
    monkeypatch.delenv("NCCL_GIN_PLUGIN", raising=False)
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    return tmp_path


def test_a_host_without_gpus(cards: Path) -> None:
    """Every row says something, and none of them more than one process can know."""
    found = between_nodes.examine("2.28.9", [])
    assert all(found.values())
    assert found["nodes and rails"].startswith(
        "1 node: all processes of this host, on the CPU. One process sees no other"
    )
    assert found["ranks_per_node"].splitlines() == [
        "1: 4 processes as 4 nodes of 1; 1 rail of 4",
        "2: 4 processes as 2 nodes of 2; 2 rails of 2",
    ]
    assert found["network cards"] == f"none in {cards}"
    assert found["NCCL plugin"].startswith("none: ")
    assert found["NCCL library"] == "2.28.9"


@pytest.mark.parametrize(
    ("reached", "says"),
    [
        ({(i, j) for i in range(4) for j in range(4)}, "1 node. One process"),
        ({(i, j) for i in range(4) for j in range(4) if i // 2 == j // 2}, "2 nodes of 2; 2 rails of 2. One"),
        (
            {(i, j) for i in range(4) for j in range(4) if (i == 3) == (j == 3)},
            "2 nodes, no rails: nodes have unequal",
        ),
        ({(i, i) for i in range(4)} | {(0, 1)}, "1 node; ranks see different nodes: rank 0 sees ranks 0, 1"),
    ],
)
def test_gpus_of_a_host(cards: Path, reached: set[tuple[int, int]], says: str) -> None:
    """GPUs that do not reach each other are nodes, by the rule that communicators have."""
    found = between_nodes.examine("2.28.9", [[(i, j) in reached for j in range(4)] for i in range(4)])
    assert found["nodes and rails"].startswith(f"a rank on each GPU of this host: {says}")
    assert found["ranks_per_node"].startswith("1: 4 GPUs as 4 nodes of 1")


def test_cards_and_a_plugin(cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port says what the kernel knows of it: a card whose cable is out is found too. Brackets are no markup."""
    port = cards / "mlx5_1" / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in (("link_layer", "InfiniBand\n"), ("rate", "400 Gb/sec (4X NDR)\n"), ("state", "1: DOWN\n")):
        (port / name).write_text(text)
    (cards / "mlx5_0").mkdir()
    monkeypatch.setenv("NCCL_NET_PLUGIN", "libnccl-net-[some].so")
    found = between_nodes.examine("2.28.9", [])
    assert found["network cards"] == "mlx5_0\nmlx5_1 (port 1: InfiniBand, 400 Gb/sec (4X NDR), 1: DOWN)"
    assert found["NCCL plugin"] == "libnccl-net-[some].so"
    assert "libnccl-net-[some].so" in shown(examination.examine())
