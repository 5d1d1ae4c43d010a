"""Files that a plan reads: constants of a cluster, and a measured routing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenloom.errors import InvalidArgument
from tokenloom.tune.network.constants import FITTED, read_constants, write_constants
from tokenloom.tune.network.routing_file import read_routing

ROOT = Path(__file__).resolve().parents[3]


def test_constants_that_are_written_are_read(tmp_path: Path) -> None:
    """Who measures a cluster writes what a plan reads."""
    measured = replace(FITTED, where="32 x H200", low_latency=replace(FITTED.low_latency, base_us=27.5))
    write_constants(tmp_path / "constants.json", measured)
    assert read_constants(tmp_path / "constants.json") == measured


def test_the_file_in_the_reference_is_one(tmp_path: Path) -> None:
    """The page is the contract between who writes such files and who reads them."""
    (block,) = re.findall(
        r"^```json\n(.*?)^```", (ROOT / "docs/reference/plan.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "constants.json").write_text(block)
    found = read_constants(tmp_path / "constants.json")
    write_constants(tmp_path / "again.json", found)
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(block)


def changed(name: str, value: Any, inside: str = "") -> dict[str, Any]:
    """The file of FITTED with one member changed, or without it."""
    content: dict[str, Any] = {
        "format": "tokenloom network constants, 1",
        "where": "here",
        "nvlink_gbytes_per_s": 347,
        "low_latency": {"base_us": 30, "nic_gbytes_per_s": 46, "exposed_share": 0, "put_us": 0},
        "high_throughput": {"base_us": 40, "nic_gbytes_per_s": 45, "exposed_share": 0.1, "put_us": 0},
    }
    of = content[inside] if inside else content
    of[name] = value
    if value is None:
        del of[name]
    return content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (changed("format", "tokenloom network constants, 2"), "format is 'tokenloom network constants, 2', expected"),
        (changed("where", None), "where missing"),
        (changed("where", 5), "where is 5, expected a text"),
        (changed("nvlink_gbytes_per_s", 0), "nvlink_gbytes_per_s is 0, expected a number above 0"),
        (changed("nic_gbytes_per_s", 40), "nic_gbytes_per_s unknown, expected format, high_throughput"),
        (changed("low_latency", [1]), "a JSON object was expected in low_latency, list came"),
        (changed("put_us", None, "low_latency"), "put_us missing in low_latency"),
        (changed("A", 1, "high_throughput"), "A unknown in high_throughput, expected base_us"),
        (changed("base_us", "30", "low_latency"), "low_latency.base_us is '30', expected a number of at least 0"),
        (changed("base_us", -1, "low_latency"), "low_latency.base_us is -1, expected a number of at least 0"),
        (changed("nic_gbytes_per_s", float("inf"), "low_latency"), "low_latency.nic_gbytes_per_s is inf, expected"),
        (changed("exposed_share", 1.5, "high_throughput"), "high_throughput.exposed_share is 1.5, expected .* 0 to 1"),
        (changed("put_us", True, "high_throughput"), "high_throughput.put_us is True, expected a number"),
        ([], "a JSON object was expected, list came"),
    ],
)
def test_a_bad_file_of_constants_is_named(tmp_path: Path, content: Any, said: str) -> None:
    """With the member at fault, and where the format is described."""
    file = tmp_path / "constants.json"
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match=rf"constants\.json: {said}.*docs/reference/plan\.md"):
        read_constants(file)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "constants.json").write_text("base_us: 30")
    with pytest.raises(InvalidArgument, match="not readable as JSON"):
        read_constants(tmp_path / "constants.json")
    with pytest.raises(InvalidArgument, match="not readable as JSON"):
        read_constants(tmp_path / "none.json")


IDS = np.array([[[0, 7], [3, -1]], [[5, 5], [-1, -1]]])


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_routings_of_numpy(tmp_path: Path, dtype: Any) -> None:
    np.save(tmp_path / "routing.npy", (IDS % 8).astype(dtype))
    found = read_routing(tmp_path / "routing.npy", 8)
    assert [each.tolist() for each in found] == (IDS % 8).tolist()
    assert {each.dtype for each in found} == {np.dtype("int64")}


def test_routings_of_torch(tmp_path: Path) -> None:
    """One tensor, or a tensor of each rank: ranks may have different numbers of tokens, or none."""
    torch.save(torch.from_numpy(IDS).int(), tmp_path / "routing.pt")
    assert [each.tolist() for each in read_routing(tmp_path / "routing.pt", 8)] == IDS.tolist()
    torch.save([torch.from_numpy(IDS[0]), torch.empty(0, 2, dtype=torch.int64)], tmp_path / "routing.pt")
    assert [each.tolist() for each in read_routing(tmp_path / "routing.pt", 8)] == [IDS[0].tolist(), []]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("routing.npy", IDS[0], r"holds 2 times \(2,\), expected integers \[W, T, K\]"),
        ("routing.npy", np.empty((0, 4, 2), dtype=np.int64), "holds 0 times"),
        ("routing.npy", IDS.astype(float), "holds float64, expected integers"),
        ("routing.npy", IDS + 1, r"has expert 8 on rank 0, expected -1 \(unused\) or 0..7; .*--num-experts"),
        ("routing.npy", IDS - 1, "has expert -2 on rank 0"),
        ("routing.pt", [torch.zeros(3, 2), torch.zeros(3, 4)], r"holds 2 times \(3, 2\), \(3, 4\), expected"),
        ("routing.pt", {"ids": torch.zeros(2, 2, 2)}, r"holds 1 times \(\), expected"),
        ("routing.csv", b"1,2", "ends in '.csv', expected one of .npy, .pt"),
        ("routing.npy", b"1,2", "cannot be read"),
        ("routing.pt", b"1,2", "cannot be read"),
    ],
)
def test_a_bad_routing_is_named(tmp_path: Path, name: str, content: Any, said: str) -> None:
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, np.ndarray):
        np.save(file, content)
    else:
        torch.save(content, file)
    with pytest.raises(InvalidArgument, match=said):
        read_routing(file, 8)
