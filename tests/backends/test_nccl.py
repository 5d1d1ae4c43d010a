"""nodes/nccl.py on a stand-in for libnccl: what it passes on, what it hands back, and what it says of failures."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tokenloom.backends.nodes import nccl
from tokenloom.backends.nodes.nccl import Nccl, NcclError, loaded_library
from tokenloom.errors import BackendUnavailable, InvalidArgument

CXX = shutil.which("g++")
# Communicator 7 works; 8 fails in the call and 9 in the background; 10 has no symmetric memory.
SOURCE = r"""
#include <string.h>
#include <stddef.h>
typedef long address;
extern "C" {
int ncclGetVersion(int* v) { *v = 23007; return 0; }
int ncclMemAlloc(void** p, size_t n) { *p = n == 4096 ? (void*)0x123456789000 : NULL; return n > 1 << 20; }
int ncclMemFree(void* p) { return p != (void*)0x123456789000; }
int ncclCommWindowRegister(void* c, void* p, size_t n, void** w, int flags) {
    *w = (address)c == 10 ? NULL : (void*)((address)p + n);
    return (address)c == 8 ? 2 : flags;
}
int ncclCommWindowDeregister(void* c, void* w) { return (address)c != 7 || w != (void*)0x12345678a000; }
int ncclDevCommCreate(void* c, const char* asked, char* made) {
    for (int i = 0; i < 5; ++i) made[i] = asked[4 - i];
    return (address)c == 8 ? 5 : 0;
}
int ncclDevCommDestroy(void* c, const char* made) { return memcmp(made, "\4\3\0\1\0", 5); }
int ncclCommAbort(void* c) { return (address)c != 7; }
const char* ncclGetErrorString(int code) { return "some error"; }
const char* ncclGetLastError(void*) { return "a rank is gone\n"; }
}
"""


def build(folder: Path, source: str = SOURCE) -> Path:
    assert CXX is not None
    library = folder / "stand_in.so"  # under its own name, it would count as this process's NCCL
    command = [CXX, "-shared", "-fPIC", "-xc++", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Nccl:
    if CXX is None:
        pytest.skip("no g++ on this machine")
    return Nccl(build(tmp_path_factory.mktemp("nccl")))


def test_calls_that_work(library: Nccl) -> None:
    """Addresses of 64 bits, sizes, and structs with zeros in them arrive whole in both directions."""
    assert library.version() == (2, 30, 7)
    address = library.allocate(4096)
    assert address == 0x123456789000
    window = library.register_window(7, address, 4096)
    assert window == address + 4096
    made = library.create_device_comm(7, b"\0\1\0\3\4", 5)
    assert made == b"\4\3\0\1\0"
    library.destroy_device_comm(7, made)
    library.deregister_window(7, window)
    library.free(address)
    library.abort(7)


def test_calls_that_fail(library: Nccl) -> None:
    """The call, its code, and NCCL's own words."""
    with pytest.raises(NcclError, match=r"ncclDevCommCreate returned 5 \(some error\): a rank is gone;") as caught:
        library.create_device_comm(8, bytes(5), 5)
    assert (caught.value.call, caught.value.code) == ("ncclDevCommCreate", 5)
    with pytest.raises(NcclError, match="ncclCommWindowRegister returned 2"):
        library.register_window(8, 4096, 4096)
    with pytest.raises(NcclError, match="ncclMemAlloc returned 1"):
        library.allocate(1 << 21)
    with pytest.raises(NcclError, match=r"ncclMemAlloc returned 0 .* no memory"):
        library.allocate(8192)
    with pytest.raises(NcclError, match="ncclCommAbort"):
        library.abort(8)


def test_windows_that_cannot_be(library: Nccl) -> None:
    """NCCL answers a communicator without symmetric memory with success and no window."""
    with pytest.raises(BackendUnavailable, match="no symmetric memory"):
        library.register_window(10, 4096, 4096)
    for address, num_bytes in ((4096 + 16, 4096), (4096, 5000), (4096, 0)):
        with pytest.raises(InvalidArgument, match="multiples of 4096"):
            library.register_window(7, address, num_bytes)


def test_libraries_that_cannot_be_used(tmp_path: Path) -> None:
    """No library, no readable one, and one that is older than device communicators."""
    (tmp_path / "broken.so").write_text("not a library")
    for path in (tmp_path / "none.so", tmp_path / "broken.so"):
        with pytest.raises(BackendUnavailable, match="does not load"):
            Nccl(path)
    if CXX is not None:
        old = build(tmp_path, SOURCE.replace("ncclDevCommCreate", "somethingElse"))
        with pytest.raises(BackendUnavailable, match=r"has no ncclDevCommCreate; update NCCL to 2\.28\.9"):
            Nccl(old)


@pytest.mark.parametrize(
    ("paths", "answer"),
    [
        (["/a/libnccl.so.2", "/a/libnccl.so.2", "/a/libcudart.so.13"], "/a/libnccl.so.2"),
        (["/with space/libnccl.so.2.28.9"], "/with space/libnccl.so.2.28.9"),
        (["/a/libcudart.so.13", "/a/libnccl-net.so"], "found none"),
        (["/a/libnccl.so.2", "/b/libnccl.so.2"], "found several: /a/libnccl.so.2, /b/libnccl.so.2"),
    ],
)
def test_the_library_that_is_loaded(
    paths: list[str], answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel lists it. Two of them are refused: a communicator of one means nothing to the other."""
    lines = [f"7f00-7f01 r-xp 00000000 08:01 123   {path}" for path in paths] + ["7f02-7f03 rw-p 00000000 00:00 0 "]
    maps = tmp_path / "maps"
    maps.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(nccl, "_MAPS", maps)
    if answer.startswith("/"):
        assert loaded_library() == Path(answer)
    else:
        with pytest.raises(BackendUnavailable, match=answer):
            loaded_library()
