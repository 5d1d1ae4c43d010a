"""How NCCL lays out its structs, as compiled from its headers: the host fills and reads them without a C compiler."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenloom._version import __version__
from tokenloom.errors import BackendUnavailable, InvalidArgument
from tokenloom.jit import cache
from tokenloom.jit.compiler import OPTIONS, compile_source, nvrtc_version
from tokenloom.jit.cubin import constant_bytes
from tokenloom.jit.nccl_headers import PRELUDE, Headers, dotted

REQUIREMENTS = "ncclDevCommRequirements"
DEVICE_COMM = "ncclDevComm"
TYPES = (DEVICE_COMM, REQUIREMENTS, "ncclGinProxyGpuCtx_t", "ncclGinProxyGfd_t", "ncclGinProxyQword_t")

_ARCH = "sm_90a"
_NAME = "nccl_layout"


@dataclass(frozen=True)
class Layout:
    """Sizes, places and defaults.

    Attributes:
        version: of NCCL, as its code: 22809 is 2.28.9.
        types: (size, alignment) in bytes, by type.
        fields: (offset, size) in bytes, by "type.field".
        defaults: what a ``ncclDevCommRequirements`` begins as.
    """

    version: int
    types: Mapping[str, tuple[int, int]]
    fields: Mapping[str, tuple[int, int]]
    defaults: bytes

    def requirements(self, **values: int) -> bytes:
        """A ``ncclDevCommRequirements``: the defaults, but for these fields.

        Raises:
            InvalidArgument: this version has no such field, or the value does not fit into it.
        """
        filled = bytearray(self.defaults)
        for name, value in values.items():
            at, size = self._field(REQUIREMENTS, name)
            if not 0 <= value < 1 << (8 * size - 1):
                raise InvalidArgument(f"{REQUIREMENTS}.{name} is {value}, expected 0..{(1 << (8 * size - 1)) - 1}")
            filled[at : at + size] = value.to_bytes(size, "little")
        return bytes(filled)

    def device_comm_value(self, device_comm: bytes, name: str) -> int:
        """A field of a ``ncclDevComm``, as an unsigned number.

        Raises:
            InvalidArgument: the bytes are no such struct, or this version has no such field.
        """
        expected = self.types[DEVICE_COMM][0]
        if len(device_comm) != expected:
            raise InvalidArgument(f"a {DEVICE_COMM} has {expected} bytes, these are {len(device_comm)}")
        at, size = self._field(DEVICE_COMM, name)
        return int.from_bytes(device_comm[at : at + size], "little")

    def _field(self, type_name: str, name: str) -> tuple[int, int]:
        try:
            return self.fields[f"{type_name}.{name}"]
        except KeyError:
            raise InvalidArgument(f"{type_name} of NCCL {self.version} has no field {name} that is known") from None


def read_layout(headers: Headers, folder: Path | None = None) -> Layout:
    """The layout, from the cache of kernels, else compiled in 1 to 4 s and kept there.

    Args:
        headers: of NCCL; the entry is named after all of their texts.
        folder: of the cache. None: where kernels are kept.

    Raises:
        BackendUnavailable: the headers are unknown, or contradict themselves.
        KernelCompileError: they do not compile.
    """
    fields = _fields(headers.version)
    changed = headers.in_memory()
    source = constants_source(TYPES, fields) + _defaults_source(headers.version)
    parts = [__version__, dotted(headers.version), headers.digest(), source, changed, OPTIONS, _ARCH, nvrtc_version()]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    entry = cache.find(key, folder)
    if entry is None:
        cubin, log = compile_source(_NAME, source, _ARCH, headers.folders, changed)
        entry = cache.Entry(key, _NAME, {}, _ARCH, 0, 0, cubin, log)
        cache.keep(entry, folder)
    version, types, places = constants_of(constant_bytes(entry.cubin, "layout_values"), TYPES, fields)
    defaults = constant_bytes(entry.cubin, "layout_defaults")
    major, minor, patch = headers.version
    if version != major * 10000 + minor * 100 + patch or len(defaults) != types[REQUIREMENTS][0]:
        raise BackendUnavailable(
            f"the headers of NCCL {dotted(headers.version)} in {headers.nccl} compile to version {version} and "
            f"{len(defaults)} bytes of {REQUIREMENTS}, expected {types[REQUIREMENTS][0]}; install NCCL again"
        )
    return Layout(version, types, places, defaults)


def constants_source(types: Sequence[str], fields: Sequence[str]) -> str:
    """A translation unit for NVRTC whose constant ``layout_values`` describes types and "type.field"s."""
    values = ["NCCL_VERSION_CODE", *(f"sizeof({each}), alignof({each})" for each in types)]
    for each in fields:
        type_name, name = each.split(".")
        values.append(f"offsetof({type_name}, {name}), sizeof({type_name}::{name})")
    return f'{PRELUDE}extern "C" __constant__ unsigned long long layout_values[] = {{{", ".join(values)}}};\n'


def constants_of(
    values: bytes, types: Sequence[str], fields: Sequence[str]
) -> tuple[int, dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """The answer of ``layout_values``: the version's code, (size, alignment) by type, (offset, size) by field."""
    version, *numbers = struct.unpack(f"<{1 + 2 * (len(types) + len(fields))}Q", values)
    pairs = dict(zip((*types, *fields), zip(numbers[::2], numbers[1::2], strict=True), strict=True))
    return version, {each: pairs[each] for each in types}, {each: pairs[each] for each in fields}


def _has_initializer(version: tuple[int, int, int]) -> bool:
    """From 2.29 on the struct carries its size and version, and a macro sets them. Before, zeros are meant."""
    return version >= (2, 29)


def _defaults_source(version: tuple[int, int, int]) -> str:
    value = "NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER" if _has_initializer(version) else "{}"
    return f'extern "C" __constant__ {REQUIREMENTS} layout_defaults = {value};\n'


def _fields(version: tuple[int, int, int]) -> list[str]:
    """Fields that the host sets before a device communicator is made, and fields that it reads."""
    asked = ["ginForceEnable", "ginContextCount", "ginSignalCount", "ginCounterCount", "railGinBarrierCount"]
    made = ["rank", "nRanks", "lsaRank", "lsaSize", "ginContextCount", "ginSignalCount", "ginCounterCount"]
    if _has_initializer(version):
        asked.append("ginConnectionType")
        made.append("ginNetDeviceTypes")
    else:
        made.append("ginTypes")
    return [f"{REQUIREMENTS}.{each}" for each in asked] + [f"{DEVICE_COMM}.{each}" for each in made]
