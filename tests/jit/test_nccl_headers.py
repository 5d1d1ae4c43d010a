"""NCCL's headers: found, compared and changed, or refused by name. On made-up ones; test_nccl_abi.py has the real."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.support.small_kernels import needs_nvrtc, scale_spec, write_package
from tokenloom.errors import BackendUnavailable, InvalidArgument, KernelCompileError
from tokenloom.jit import cache, compiler, nccl_headers, nccl_layout
from tokenloom.jit.cubin import constant_bytes
from tokenloom.jit.nccl_headers import CHECKED, check_versions, dotted, find_headers, version_of, why_unchecked
from tokenloom.jit.nccl_layout import DEVICE_COMM, REQUIREMENTS, read_layout

DESCRIPTOR = """#ifndef GIN_PROXY_DEFS_H
#define GIN_PROXY_DEFS_H
typedef union {
  uint64_t raw;
  struct { uint8_t flag; uint32_t low; uint16_t high; uint8_t last; } __attribute__((packed)) inlineLow;
} ncclGinProxyQword_t;
static_assert(sizeof(ncclGinProxyQword_t) == 8, "packed");
typedef struct { ncclGinProxyQword_t qword[8]; } ncclGinProxyGfd_t;
typedef struct { int nranks; ncclGinProxyGfd_t *queues; } ncclGinProxyGpuCtx_t;
#endif
"""
UTILITY = """#ifndef NCCL_UTILITY_H
#define NCCL_UTILITY_H
template<typename T> union ncclParts {
  uint16_t part[sizeof(T)/2];
};
template<typename T> union ncclParts4 { uint32_t part[sizeof(T)/4]; };
template<typename T> union ncclParts8 { uint64_t part[sizeof(T)/8]; };
struct alignas(16) ulonglong2_t { uint64_t x, y; };
#define ulonglong2 ulonglong2_t
template<typename T> union ncclParts16 { ulonglong2 part[sizeof(T)/16]; };
inline __host__ int of_a_byte() { return sizeof(ncclParts8<char>); }
#endif
"""
DEVICE = """#include <stdint.h>
#include <new>
#include <nccl.h>
#include "nccl_device/utility.h"
#include "nccl_device/gin/proxy/gin_proxy_device_host_common.h"
struct ncclDevCommRequirements {
  void* list; bool ginForceEnable;
  int ginContextCount, ginSignalCount, ginCounterCount, railGinBarrierCount;
};
struct ncclDevComm {
  int rank, nRanks, lsaRank, lsaSize; uint8_t ginContextCount, ginTypes[4]; int ginSignalCount, ginCounterCount;
};
"""
NCCL = """#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 9
#define NCCL_VERSION_CODE 22809
"""


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which pip would have put NVIDIA's packages, with as little in them as compiles."""
    folder = tmp_path / "nvidia"
    for path, text in {
        "nccl/include/nccl.h": NCCL,
        "nccl/include/nccl_device.h": DEVICE,
        "nccl/include/nccl_device/utility.h": UTILITY,
        "nccl/include/nccl_device/gin/proxy/gin_proxy_device_host_common.h": DESCRIPTOR,
        "nccl/lib/libnccl.so.2": "",
        "cu13/include/cuda_runtime.h": "",
        "cu13/include/cccl/cuda/atomic": "",
        "cu13/include/cccl/cuda/std/cstdint": "using uint8_t = unsigned char; using uint16_t = unsigned short;\n"
        "using uint32_t = unsigned; using uint64_t = unsigned long long;\n",
        "cu13/include/cccl/cuda/std/cstddef": "#define offsetof(type, field) __INTADDR__(&((type*)0)->field)\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    monkeypatch.setattr(nccl_headers, "_wheels", lambda: [folder])
    return folder


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


# -- finding -----------------------------------------------------------------------------------------------------


def test_headers_lie_beside_the_library(nvidia: Path, tmp_path: Path) -> None:
    """Through a link, as programs find the library; by the wheel without one; and in a folder that is named."""
    link = tmp_path / "elsewhere.so"
    link.symlink_to(nvidia / "nccl/lib/libnccl.so.2")
    beside = find_headers(link)
    assert beside.version == (2, 28, 9)
    assert beside == find_headers(None) == find_headers(Path("/no/lib/libnccl.so"), nvidia / "nccl/include")
    system = tmp_path / "usr/lib/x86_64-linux-gnu/libnccl.so.2"
    system.parent.mkdir(parents=True)
    system.write_text("")
    (nvidia / "nccl/include").rename(tmp_path / "usr/include")
    assert find_headers(system).nccl == tmp_path / "usr/include", "a distribution's library"


PACKAGES = "pip install 'nvidia-cuda-cccl>=13,<14' 'nvidia-cuda-runtime>=13,<14'"


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("nccl/include/nccl_device.h", ["NCCL's headers", "install nvidia-nccl-cu13"]),
        (
            "cu13/include/cuda_runtime.h",
            ["CUDA's runtime", PACKAGES],
        ),
        (
            "cu13/include/cccl/cuda/atomic",
            ["CCCL", PACKAGES],
        ),
    ],
)
def test_missing_headers_are_named(nvidia: Path, monkeypatch: pytest.MonkeyPatch, lost: str, words: list[str]) -> None:
    """What is missing, where it was looked for, and what to install. The toolkit's folder may have CUDA's."""
    (nvidia / lost).unlink()
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: "/usr/local" not in str(path) and is_file(path))
    with pytest.raises(BackendUnavailable) as caught:
        find_headers(nvidia / "nccl/lib/libnccl.so.2")
    assert all(word in str(caught.value) for word in [*words, str(nvidia)])


@pytest.mark.parametrize("found", [None, types.SimpleNamespace(submodule_search_locations=None)])
def test_no_package_of_nvidia(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    """A CPU machine without any, or with a module of that name: an error with a reason, not one of Python's."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(BackendUnavailable, match=r"NCCL's headers.*are missing"):
        find_headers(None)


@pytest.mark.parametrize(("minor", "patch"), [(27, 9), (28, 8)])
def test_an_old_nccl_is_refused(nvidia: Path, minor: int, patch: int) -> None:
    """The oldest version is the first that was tried."""
    edit(nvidia / "nccl/include/nccl.h", "MINOR 28", f"MINOR {minor}")
    edit(nvidia / "nccl/include/nccl.h", "PATCH 9", f"PATCH {patch}")
    with pytest.raises(BackendUnavailable, match=rf"NCCL 2\.{minor}\.{patch} is too old.*2\.28\.9"):
        find_headers(None)


def test_checked_versions_are_those_recorded() -> None:
    """Nobody is told that a version was checked whose structs no test compares, or the other way round."""
    recorded = json.loads((Path(__file__).parent / "nccl_constants.json").read_text())["constants"]
    assert set(recorded) == set(map(dotted, CHECKED))
    for version in CHECKED:
        major, minor, patch = version
        assert recorded[dotted(version)]["version"] == [10000 * major + 100 * minor + patch]
        assert why_unchecked(version) == ""
    assert why_unchecked((2, 31, 1)) == "NCCL 2.31.1 is not among the checked versions 2.28.9, 2.30.7, 2.32.3"


def test_a_header_without_a_version(nvidia: Path) -> None:
    """Somebody else's nccl.h."""
    edit(nvidia / "nccl/include/nccl.h", "#define NCCL_MINOR 28", "")
    with pytest.raises(BackendUnavailable, match="states no version"):
        version_of(nvidia / "nccl/include")


def test_headers_of_another_version_than_the_library(nvidia: Path) -> None:
    """Both versions are told: kernels would write descriptors that this library does not read so."""
    headers = find_headers(None)
    check_versions(headers, (2, 28, 9))
    with pytest.raises(BackendUnavailable, match=r"library is 2\.30\.7, but its headers in .* are 2\.28\.9"):
        check_versions(headers, (2, 30, 7))


# -- changing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "old", "new", "times"),
    [
        ("nccl_device/gin/proxy/gin_proxy_device_host_common.h", "typedef union {", "typedef union Word {", 0),
        ("nccl_device/gin/proxy/gin_proxy_device_host_common.h", "#endif", "typedef union { int x; } Y;\n#endif", 2),
        ("nccl_device/utility.h", "part[sizeof(T)/8]", "part[words]", 0),
    ],
)
def test_unknown_texts_are_refused(nvidia: Path, path: str, old: str, new: str, times: int) -> None:
    """A version that writes them another way is not guessed at; its name is told."""
    edit(nvidia / "nccl/include" / path, old, new)
    with pytest.raises(BackendUnavailable, match=rf"NCCL 2\.28\.9 are unknown: .*{path}.* {times} times, expected"):
        find_headers(None).in_memory()


def test_nothing_on_disk_changes(nvidia: Path) -> None:
    """The headers belong to the user's NCCL."""
    before = find_headers(None).digest()
    find_headers(None).in_memory()
    assert find_headers(None).digest() == before


# -- kernels behind them -----------------------------------------------------------------------------------------


@needs_nvrtc
def test_a_kernel_behind_the_headers(nvidia: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees NCCL's names, by folders and in memory. Its entry is of these headers: others make another one."""
    monkeypatch.setattr(compiler, "PACKAGE", write_package(tmp_path / "package"))
    edit(tmp_path / "package/device/deep/seven.cuh", "kSeven = 7", "kSeven = sizeof(ncclGinProxyQword_t)")
    alone, folder = scale_spec(), tmp_path / "cache"
    with pytest.raises(KernelCompileError, match="ncclGinProxyQword_t"):
        cache.get(alone, folder)
    behind = alone.behind(find_headers(None).prelude())
    entry = cache.get(behind, folder)
    assert cache.stored(alone.behind(find_headers(None).prelude()), folder) == entry
    keys = {cache.key_of(alone), entry.key}
    edit(nvidia / "nccl/include/nccl_device.h", "int rank, nRanks", "int magic, rank, nRanks")
    keys.add(cache.key_of(alone.behind(find_headers(None).prelude())))
    edit(nvidia / "nccl/include/nccl.h", "PATCH 9", "PATCH 10")
    keys.add(cache.key_of(alone.behind(find_headers(None).prelude())))
    assert len(keys) == 4


# -- the layout --------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled since the test began."""
    names: list[str] = []

    def compile_source(name: str, *arguments: object) -> tuple[bytes, str]:
        names.append(name)
        return compiler.compile_source(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(nccl_layout, "compile_source", compile_source)
    return names


@needs_nvrtc
def test_the_layout_is_kept_beside_the_kernels(nvidia: Path, tmp_path: Path, compiled: list[str]) -> None:
    """One compilation for each text of the headers: a second process reads the file, another text compiles."""
    folder = tmp_path / "cache"
    layout = read_layout(find_headers(None), folder)
    assert layout.version == 22809
    assert layout.types[DEVICE_COMM] == (32, 4)
    assert layout.types["ncclGinProxyGpuCtx_t"] == (16, 8)
    assert layout.types["ncclGinProxyQword_t"] == (8, 8), "packed, and still aligned"
    assert layout.fields[f"{REQUIREMENTS}.ginSignalCount"] == (16, 4)
    assert layout.defaults == bytes(32)
    assert read_layout(find_headers(None), folder) == layout
    assert compiled == ["nccl_layout"]
    edit(nvidia / "nccl/include/nccl_device.h", "int rank, nRanks", "int magic, rank, nRanks")
    assert read_layout(find_headers(None), folder).types[DEVICE_COMM] == (36, 4)
    assert len(compiled) == 2


@needs_nvrtc
def test_bad_values_for_the_structs(nvidia: Path, tmp_path: Path) -> None:
    """Each would be written over a neighbour, or read from one."""
    layout = read_layout(find_headers(None), tmp_path / "cache")
    assert layout.requirements(ginForceEnable=1, ginContextCount=4)[8:16] == bytes([1, 0, 0, 0, 4, 0, 0, 0])
    with pytest.raises(InvalidArgument, match="has no field ginQueueDepth"):
        layout.requirements(ginQueueDepth=1)
    with pytest.raises(InvalidArgument, match=r"ginForceEnable is 256, expected 0\.\.127"):
        layout.requirements(ginForceEnable=256)
    with pytest.raises(InvalidArgument, match="ginContextCount is -1"):
        layout.requirements(ginContextCount=-1)
    with pytest.raises(InvalidArgument, match="has 32 bytes, these are 31"):
        layout.device_comm_value(bytes(31), "rank")


@needs_nvrtc
def test_headers_that_contradict_themselves(nvidia: Path, tmp_path: Path) -> None:
    """nccl.h states one version to readers and another to the compiler: a mix of two installations."""
    edit(nvidia / "nccl/include/nccl.h", "22809", "23007")
    with pytest.raises(BackendUnavailable, match=r"2\.28\.9 .* compile to version 23007"):
        read_layout(find_headers(None), tmp_path / "cache")


@needs_nvrtc
def test_constants_of_a_cubin() -> None:
    """Those with bytes, those of zeros alone, and none of that name; a cut file is an error with a name."""
    source = 'extern "C" __constant__ int some[] = {1, 2};\nextern "C" __device__ long long zeros[2] = {};\n'
    cubin, _ = compiler.compile_source("constants", source, "sm_90a")
    assert constant_bytes(cubin, "some") == bytes([1, 0, 0, 0, 2, 0, 0, 0])
    assert constant_bytes(cubin, "zeros") == bytes(16)
    with pytest.raises(KernelCompileError, match="no constant som;"):
        constant_bytes(cubin, "som")
    for damaged in (b"", b"no ELF" * 20, cubin[:200]):
        with pytest.raises(KernelCompileError, match="damaged"):
            constant_bytes(damaged, "some")


@pytest.mark.slow
def test_one_node_pays_nothing() -> None:
    """Importing the package and every backend loads none of this: a group without a network never needs it."""
    names = "[each for each in sys.modules if each.startswith('tokenloom') and 'nccl' in each]"
    script = f"import sys, tokenloom, tokenloom.backends.registry\nprint({names})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
