"""Constants of the cost model, and the file that holds those of a cluster.

docs/reference/plan.md shows the file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tokenloom.errors import InvalidArgument
from tokenloom.plan import is_number

FORMAT = "tokenloom network constants, 1"
"""First member of a file. The number goes up when a reader would misunderstand."""
_CURE = "docs/reference/plan.md shows what the file holds"


def _require_time(name: str, us: Any) -> None:
    if not (is_number(us) and us >= 0):
        raise InvalidArgument(f"{name} is {us!r}, expected a number of at least 0")


def _require_rate(name: str, gbytes_per_s: Any) -> None:
    if not (is_number(gbytes_per_s) and gbytes_per_s > 0):
        raise InvalidArgument(f"{name} is {gbytes_per_s!r}, expected a number above 0")


@dataclass(frozen=True)
class Regime:
    """How calls of one kind use a network.

    Attributes:
        base_us: A, microseconds of a call that moves no bytes.
        nic_gbytes_per_s: b, what a GPU's NIC carries in each direction; 1 GB is 1e9 bytes.
        exposed_share: κ, share of the shorter of both transfers, NIC and NVLink, that nothing hides; 0 to 1.
        put_us: m, microseconds of a NIC or host thread for each put; 0 where they cost nothing.

    Raises:
        InvalidArgument: a value is out of its bounds.
    """

    base_us: float
    nic_gbytes_per_s: float
    exposed_share: float
    put_us: float

    def __post_init__(self) -> None:
        _require_time("base_us", self.base_us)
        _require_rate("nic_gbytes_per_s", self.nic_gbytes_per_s)
        if not (is_number(self.exposed_share) and 0 <= self.exposed_share <= 1):
            raise InvalidArgument(f"exposed_share is {self.exposed_share!r}, expected a number from 0 to 1")
        _require_time("put_us", self.put_us)


@dataclass(frozen=True)
class Constants:
    """Constants of a cluster.

    Attributes:
        where: what they come from: a cluster, software, a day.
        nvlink_gbytes_per_s: what the NVLinks of a GPU carry in each direction; 1 GB is 1e9 bytes.
        low_latency: calls of few tokens, whose rows leave at once.
        high_throughput: calls of many tokens, in pieces that follow each other through NIC and NVLink.

    Raises:
        InvalidArgument: a value is out of its bounds.
    """

    where: str
    nvlink_gbytes_per_s: float
    low_latency: Regime
    high_throughput: Regime

    def __post_init__(self) -> None:
        _require_rate("nvlink_gbytes_per_s", self.nvlink_gbytes_per_s)

    def regime(self, name: str) -> Regime:
        """The constants of one of REGIMES."""
        return {"low_latency": self.low_latency, "high_throughput": self.high_throughput}[name]


REGIMES = ("low_latency", "high_throughput")
PIECES = {"low_latency": 1, "high_throughput": 4}
"""Puts of a call to each other node, where a token sends a row per node: all rows of a piece travel in one."""

FITTED = Constants(
    where="fitted to published figures for a NIC of 400 Gb/s a GPU; NVLink as an H200 was measured",
    nvlink_gbytes_per_s=347.0,
    low_latency=Regime(base_us=30.0, nic_gbytes_per_s=46.0, exposed_share=0.0, put_us=0.0),
    high_throughput=Regime(base_us=40.0, nic_gbytes_per_s=45.0, exposed_share=0.1, put_us=0.0),
)
"""Used where nothing was measured. tests/tune/network/test_published.py holds them to the figures."""


def with_rates(
    constants: Constants,
    nic_gbytes_per_s: float | None = None,
    nvlink_gbytes_per_s: float | None = None,
    put_us: float | None = None,
) -> Constants:
    """Constants with other rates of the hardware, in both regimes; None leaves a rate as it is.

    Raises:
        InvalidArgument: a rate is out of its bounds.
    """
    given = {"nic_gbytes_per_s": nic_gbytes_per_s, "put_us": put_us}
    changes = {name: value for name, value in given.items() if value is not None}
    regimes: dict[str, Any] = {name: replace(constants.regime(name), **changes) for name in REGIMES}
    if nvlink_gbytes_per_s is not None:
        changes["nvlink_gbytes_per_s"] = regimes["nvlink_gbytes_per_s"] = nvlink_gbytes_per_s
    where = f"{constants.where}; {', '.join(changes)} as given" if changes else constants.where
    return replace(constants, where=where, **regimes)


def write_constants(file: Path, constants: Constants) -> None:
    """Write constants to a file that :func:`read_constants` reads."""
    content = {"format": FORMAT, **asdict(constants)}
    file.write_text(json.dumps(content, indent=1) + "\n")


def read_constants(file: Path) -> Constants:
    """Read constants.

    Raises:
        InvalidArgument: the file cannot be read, or something in it is missing, unknown or out of its bounds.
    """
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{file} is not readable as JSON ({error}); {_CURE}") from error
    try:
        found = _members(content, {"format", *(each.name for each in fields(Constants))}, "")
        if found["format"] != FORMAT:
            raise InvalidArgument(f"format is {found['format']!r}, expected {FORMAT!r}")
        if not isinstance(found["where"], str):
            raise InvalidArgument(f"where is {found['where']!r}, expected a text")
        regimes = {name: _regime(name, found[name]) for name in REGIMES}
        return Constants(found["where"], found["nvlink_gbytes_per_s"], **regimes)
    except InvalidArgument as error:
        raise InvalidArgument(f"{file}: {error}; {_CURE}") from error


def _regime(name: str, content: Any) -> Regime:
    found = _members(content, {each.name for each in fields(Regime)}, f" in {name}")
    try:
        return Regime(**found)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}.{error}") from error


def _members(content: Any, names: set[str], where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise InvalidArgument(f"a JSON object was expected{where}, {type(content).__name__} came")
    if missing := sorted(names - set(content)):
        raise InvalidArgument(f"{', '.join(missing)} missing{where}")
    if unknown := sorted(set(content) - names):
        raise InvalidArgument(f"{', '.join(unknown)} unknown{where}, expected {', '.join(sorted(names))}")
    return content
