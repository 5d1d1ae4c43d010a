"""NCCL's structs as NVRTC lays them out are those that NCCL itself was compiled with, in every supported version.

NVRTC ignores the attribute that packs structs, so a mistake compiles, runs, and sends nonsense over the network.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.nccl_constants import CONTEXT, DESCRIPTOR, by_cxx, by_nvrtc
from tests.support.nccl_wheels import headers_of
from tests.support.small_kernels import needs_nvrtc
from tokenloom.jit.compiler import Resources, compile_source
from tokenloom.jit.nccl_headers import CHECKED, PRELUDE, Headers, dotted
from tokenloom.jit.nccl_layout import DEVICE_COMM, REQUIREMENTS, read_layout

EXPERIMENTAL = True

VERSIONS = tuple(map(dotted, CHECKED))
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "nccl_constants.json").read_text())
CXX = shutil.which("g++")

# What a backend needs: a put with its signal, a look at a signal within our own deadlines, memory of GPUs of the node.
KERNEL = (
    PRELUDE
    + """#include "device/sync/wait.cuh"
extern "C" __global__ void put_and_look(const __grid_constant__ ncclDevComm comm, ncclWindow_t window, uint64* seen) {
    ncclGin gin{comm, 0};
    ncclTeam rail = ncclTeamRail(comm);
    gin.put(rail, (rail.rank + 1) % rail.nRanks, window, 4096, window, 0, 4096, ncclGin_SignalInc{1});
    gin.signal(rail, 0, ncclGin_SignalAdd{2, 7});
    const uint64 began = global_timer_ns();
    while (gin.readSignal(1) == 0 && global_timer_ns() - began < 1000) sleep_ns(64);
    *seen = gin.readSignal(1) + *static_cast<uint64*>(ncclGetLsaPointer(window, 0, 0)) + gin.readCounter(0);
}
"""
)

pytestmark = [pytest.mark.slow, needs_nvrtc]


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def headers(version: str) -> Headers:
    return headers_of(version)


def test_nvrtc_lays_them_out_as_recorded(version: str, headers: Headers) -> None:
    """Every size, alignment, offset, and the bits of every field of a descriptor."""
    assert by_nvrtc(headers, headers.in_memory()) == RECORDED["constants"][version]


def test_kernels_compile(headers: Headers) -> None:
    """NCCL's calls and our own device code in one kernel, without a C compiler, nvcc or a patched header."""
    cubin, log = compile_source("put_and_look", KERNEL, "sm_90a", headers.folders, headers.in_memory())
    assert b"put_and_look" in cubin
    assert Resources.from_log(log).registers > 0


@pytest.mark.skipif(CXX is None, reason="no g++ on this machine")
def test_the_recorded_ones_are_those_of_the_hosts_compiler(version: str, headers: Headers, tmp_path: Path) -> None:
    """What the record is worth: it comes from the headers as they are, which g++ understands."""
    assert CXX is not None
    assert by_cxx(headers, CXX, tmp_path) == RECORDED["constants"][version]


def test_packing_the_whole_file_would_be_noticed(version: str, headers: Headers) -> None:
    """The obvious remedy compiles as well, and moves what NCCL fills: these tests must see it."""
    texts = headers.in_memory()
    (copy,) = (name for name in texts if "descriptor" in name)
    texts[copy] = f"#pragma pack(push, 1)\n{(headers.nccl / DESCRIPTOR).read_text()}\n#pragma pack(pop)\n"
    found, right = by_nvrtc(headers, texts), RECORDED["constants"][version]
    assert {name for name in right if found[name] != right[name]} >= {CONTEXT, "ncclGinProxyQword_t"}


def test_the_layout_that_the_host_uses(version: str, headers: Headers, tmp_path: Path) -> None:
    """Its numbers are the recorded ones, and a struct to fill begins as NCCL's macro has it."""
    layout = read_layout(headers, tmp_path)
    recorded = RECORDED["constants"][version]
    assert [layout.version] == recorded["version"]
    assert {name: list(pair) for name, pair in (layout.types | layout.fields).items()}.items() <= recorded.items()
    size = layout.types[REQUIREMENTS][0]
    first = int.from_bytes(layout.defaults[:8], "little")
    assert first == (0 if version == "2.28.9" else size), "from 2.29 on the struct begins with its size"
    filled = layout.requirements(ginForceEnable=1, ginContextCount=3)
    at, length = layout.fields[f"{REQUIREMENTS}.ginContextCount"]
    assert filled[at : at + length] == (3).to_bytes(4, "little")
    changed = [i for i in range(size) if filled[i] != layout.defaults[i]]
    assert changed == [layout.fields[f"{REQUIREMENTS}.ginForceEnable"][0], at]
    made = bytearray(layout.types[DEVICE_COMM][0])
    made[layout.fields[f"{DEVICE_COMM}.nRanks"][0]] = 8
    assert layout.device_comm_value(bytes(made), "nRanks") == 8
