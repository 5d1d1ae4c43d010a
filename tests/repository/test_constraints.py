"""The two sets of versions that CI runs: with the oldest client programs that are served, and with the newest."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = {"megatron-core", "transformers"}
"""What differs."""


def pins(name: str) -> dict[str, str]:
    lines = (line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#"))
    return dict(line.split("==") for line in lines)


def test_the_sets_differ_in_client_programs_alone() -> None:
    usual, newest = pins("constraints.txt"), pins("constraints-newest.txt")
    assert newest.keys() <= usual.keys()
    assert {name for name, version in newest.items() if usual[name] != version} == CLIENTS
