"""NCCL's device headers for NVRTC: found beside the library, compared with it, and changed in memory.

Kernels that call NCCL must be compiled from the headers of the very library that runs. So nothing of NCCL is shipped
or patched: the headers of the user's own copy are read, and NVRTC gets changed copies of the two it cannot take.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from tokenloom.errors import BackendUnavailable
from tokenloom.jit.compiler import Prelude

OLDEST = (2, 28, 9)
"""The first version whose communicator the kernels have run with."""
CHECKED = ((2, 28, 9), (2, 30, 7), (2, 32, 3))
"""The versions in which tests have compared NVRTC's structs with those of the compiler of NCCL's host side."""
INSTALL = "pip install 'nvidia-cuda-cccl>=13,<14' 'nvidia-cuda-runtime>=13,<14'"

_DESCRIPTOR = "nccl_device/gin/proxy/gin_proxy_device_host_common.h"
_UTILITY = "nccl_device/utility.h"
_CHANGES: dict[str, tuple[tuple[str, str], ...]] = {
    # NVRTC ignores the attribute that packs a struct, but not the pragma. It is put around the union of the
    # descriptor's words alone: around the whole file it would move the fields of the context that NCCL fills. A packed
    # union has an alignment of 1, and would be loaded by bytes; the compilers of NCCL give it 8.
    _DESCRIPTOR: (
        (r"typedef union \{", "#pragma pack(push, 1)\ntypedef union alignas(8) {"),
        (r"\} ncclGinProxyQword_t;", "} ncclGinProxyQword_t;\n#pragma pack(pop)"),
    ),
    # NVRTC takes no arrays of length 0, which these are for types smaller than their elements.
    _UTILITY: tuple(
        (rf"{kind} part\[sizeof\(T\) ?/ ?{size}\];", f"{kind} part[(sizeof(T) + {size - 1}) / {size}];")
        for kind, size in (("uint16_t", 2), ("uint32_t", 4), ("uint64_t", 8), ("ulonglong2", 16))
    ),
}
_COPIES = {_DESCRIPTOR: "tokenloom_nccl_descriptor.h", _UTILITY: "tokenloom_nccl_utility.h"}

# Headers of C and C++ that NCCL includes and NVRTC lacks. CCCL has the types; the rest is not used on the device.
_EMPTY = ("new", "algorithm")
_AS_STDINT = (
    *("stddef.h", "stdlib.h", "stdio.h", "string.h", "assert.h", "limits.h", "stdbool.h", "math.h", "errno.h"),
    *("cstdint", "cstddef", "cstring", "cassert", "type_traits", "utility"),
)

# The changed copies come first. They have the include guards of the originals, which are therefore skipped.
PRELUDE = f"""#undef __host__
#define __host__
#define NCCL_GIN_GDAKI_ENABLE 0
#define NCCL_GIN_GPI_ENABLE 0
#define NCCL_GIN_EFA_GDA_ENABLE 0
#include <stdint.h>
#include <cuda/std/cstddef>
#include "{_COPIES[_DESCRIPTOR]}"
#include "{_COPIES[_UTILITY]}"
#include <nccl_device.h>
"""
"""Begins every translation unit that calls NCCL. Of GIN's kinds it leaves PROXY: the structs of the others need cards
to be tried on."""


@dataclass(frozen=True)
class Headers:
    """Where the headers lie, and of which NCCL they are.

    Attributes:
        nccl: folder with nccl.h.
        runtime: folder with cuda_runtime.h.
        cccl: folder with cuda/atomic.
        version: of NCCL's headers, say (2, 28, 9).
    """

    nccl: Path
    runtime: Path
    cccl: Path
    version: tuple[int, int, int]

    @property
    def folders(self) -> tuple[Path, Path, Path]:
        """Folders to look for headers in, in their order."""
        return self.nccl, self.runtime, self.cccl

    def in_memory(self) -> dict[str, str]:
        """Texts of the headers that :data:`PRELUDE` includes and no folder has, by name.

        Raises:
            BackendUnavailable: a text to change is not there exactly once, so these headers are unknown.
        """
        texts = {"stdint.h": "#include <cuda/std/cstdint>\n", **dict.fromkeys(_EMPTY, "")}
        texts |= dict.fromkeys(_AS_STDINT, "#include <stdint.h>\n")
        texts = {name: "#pragma once\n" + text for name, text in texts.items()}
        return texts | {_COPIES[path]: self._changed(path) for path in _COPIES}

    def digest(self) -> str:
        """Hash of all of NCCL's headers."""
        found = hashlib.sha256()
        for path in [self.nccl / "nccl.h", self.nccl / "nccl_device.h", *sorted(self.nccl.glob("nccl_device/**/*.h"))]:
            found.update(f"{path.relative_to(self.nccl)}\0".encode() + path.read_bytes() + b"\0")
        return found.hexdigest()

    def prelude(self) -> Prelude:
        """The prelude of kernels that call NCCL; see ``KernelSpec.behind``.

        Raises:
            BackendUnavailable: as :meth:`in_memory`.
        """
        digest = f"NCCL {dotted(self.version)} {self.digest()}"
        return Prelude(PRELUDE, self.folders, tuple(self.in_memory().items()), digest)

    def _changed(self, path: str) -> str:
        text = _text(self.nccl / path)
        for pattern, new in _CHANGES[path]:
            text, times = re.subn(pattern, new, text)
            if times != 1:
                raise BackendUnavailable(
                    f"the headers of NCCL {dotted(self.version)} are unknown: {self.nccl / path} has the text "
                    f"{pattern!r} {times} times, expected once; install a version of NCCL that tokenloom knows"
                )
        return text


def find_headers(library: Path | None, folder: Path | None = None) -> Headers:
    """The headers beside a libnccl, and CUDA's.

    Args:
        library: the loaded libnccl, say ".../nvidia/nccl/lib/libnccl.so.2". None: look in NCCL's wheel.
        folder: NCCL's headers, if they do not lie beside the library.

    Raises:
        BackendUnavailable: some are missing, or NCCL is older than :data:`OLDEST`. The message says which, and where
            they were looked for.
    """
    wheels = _wheels()
    if folder is not None:
        beside = [folder]
    elif library is not None:
        real = library.resolve()
        beside = [real.parents[up] / "include" for up in range(1, min(3, len(real.parents)))]
    else:
        beside = [wheel / "nccl" / "include" for wheel in wheels]
    nccl = _folder_with(
        "nccl_device.h", beside, "NCCL's headers, of version 2.28.9 or newer", "install nvidia-nccl-cu13"
    )
    cuda = [*(wheel / "cu13" / "include" for wheel in wheels), Path("/usr/local/cuda/include")]
    runtime = _folder_with("cuda_runtime.h", cuda, "the headers of CUDA's runtime", INSTALL)
    cccl = _folder_with("cuda/atomic", [each / "cccl" for each in cuda], "CCCL's headers", INSTALL)
    version = version_of(nccl)
    if version < OLDEST:
        raise BackendUnavailable(
            f"NCCL {dotted(version)} is too old for kernels that call it; update it to {dotted(OLDEST)} or newer"
        )
    return Headers(nccl, runtime, cccl, version)


def check_versions(headers: Headers, library_version: tuple[int, int, int]) -> None:
    """Refuse headers of another version than the library's: the structs that both use may differ.

    Raises:
        BackendUnavailable: they differ.
    """
    if headers.version != library_version:
        raise BackendUnavailable(
            f"NCCL's library is {dotted(library_version)}, but its headers in {headers.nccl} are "
            f"{dotted(headers.version)}; install headers and library of one version"
        )


def why_unchecked(version: tuple[int, int, int]) -> str:
    """That nobody has compared the structs of a version, or ""."""
    if version in CHECKED:
        return ""
    return f"NCCL {dotted(version)} is not among the checked versions {', '.join(map(dotted, CHECKED))}"


def version_of(folder: Path) -> tuple[int, int, int]:
    """The version that nccl.h in a folder states.

    Raises:
        BackendUnavailable: it states none.
    """
    text = _text(folder / "nccl.h")
    found = [re.search(rf"^#define NCCL_{part} (\d+)", text, re.MULTILINE) for part in ("MAJOR", "MINOR", "PATCH")]
    major, minor, patch = (int(each[1]) if each is not None else -1 for each in found)
    if min(major, minor, patch) < 0:
        raise BackendUnavailable(f"{folder / 'nccl.h'} states no version; install NCCL again")
    return major, minor, patch


def dotted(version: tuple[int, ...]) -> str:
    """A version as people write it."""
    return ".".join(map(str, version))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BackendUnavailable(f"{path}: {error.strerror}; install NCCL again") from error


def _wheels() -> list[Path]:
    """Folders in which pip puts NVIDIA's packages."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    return [Path(each) for each in spec.submodule_search_locations or ()] if spec else []


def _folder_with(witness: str, folders: list[Path], what: str, cure: str) -> Path:
    for each in folders:
        if (each / witness).is_file():
            return each
    looked = ", ".join(map(str, folders)) or "any folder: pip has installed no package of NVIDIA"
    raise BackendUnavailable(f"{what} are missing: no {witness} in {looked}; {cure}")
