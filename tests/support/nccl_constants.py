"""All that kernels and the host must agree on about NCCL's structs, as two compilers see it."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tokenloom.jit.compiler import compile_source
from tokenloom.jit.cubin import constant_bytes
from tokenloom.jit.nccl_headers import Headers
from tokenloom.jit.nccl_layout import DEVICE_COMM, REQUIREMENTS, TYPES, constants_of, constants_source

DESCRIPTOR = "nccl_device/gin/proxy/gin_proxy_device_host_common.h"
CONTEXT = "ncclGinProxyGpuCtx_t"
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_WORD = re.compile(r"struct \{([^{}]*)\} (?:__attribute__\(\(packed\)\) )?(\w+);")

Constants = dict[str, list[int]]
"""Type -> [size, alignment]; type.field -> [offset, size]; union's member.field -> [the word with its bits set]."""


def by_nvrtc(headers: Headers, in_memory: Mapping[str, str]) -> Constants:
    """As tokenloom compiles them."""
    fields, words = _struct_fields(headers), _word_fields(headers)
    source = constants_source(TYPES, fields) + _word_source(words, "__constant__")
    cubin, _ = compile_source("nccl_abi", source, "sm_90a", headers.folders, in_memory)
    found = _pairs(constant_bytes(cubin, "layout_values"), fields)
    return found | {each: _number(constant_bytes(cubin, f"word_{i}")) for i, each in enumerate(words)}


def by_cxx(headers: Headers, compiler: str, folder: Path) -> Constants:
    """As the host's compiler has them, from the headers as they are."""
    fields, words = _struct_fields(headers), _word_fields(headers)
    values = constants_source(TYPES, fields).splitlines()[-1].replace("__constant__ ", "const ")
    includes = ("cuda_runtime.h", "cstddef", "nccl_device.h", DESCRIPTOR)
    source = "".join(f"#include <{each}>\n" for each in includes) + values + _word_source(words, "const")
    library = folder / "nccl_abi.so"
    options = ["-std=c++17", "-shared", "-fPIC", "-w", "-DNCCL_GIN_GDAKI_ENABLE=0", "-xc++", "-", f"-o{library}"]
    command = [compiler, *options, *(f"-I{each}" for each in headers.folders)]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    loaded = ctypes.CDLL(str(library))
    num_bytes = 8 * (1 + 2 * (len(TYPES) + len(fields)))
    found = _pairs(bytes((ctypes.c_ubyte * num_bytes).in_dll(loaded, "layout_values")), fields)
    for i, each in enumerate(words):
        length = ctypes.c_uint64.in_dll(loaded, f"length_{i}").value
        found[each] = _number(bytes((ctypes.c_ubyte * length).in_dll(loaded, f"word_{i}")))
    return found


def _pairs(values: bytes, fields: list[str]) -> Constants:
    version, types, places = constants_of(values, TYPES, fields)
    return {"version": [version], **{name: list(pair) for name, pair in (types | places).items()}}


def _number(word: bytes) -> list[int]:
    return [int.from_bytes(word, "little")]


def _struct_fields(headers: Headers) -> list[str]:
    """All fields of the structs that host and device share, by the headers' text."""
    bodies = {}
    for path in sorted(headers.nccl.glob("nccl_device/**/*.h")):
        text = _COMMENT.sub("", path.read_text())
        for name in (DEVICE_COMM, REQUIREMENTS):
            for found in re.finditer(rf"struct {name} \{{(.*?)\}}", text, re.DOTALL):
                bodies[name] = found[1]
    text = _COMMENT.sub("", (headers.nccl / DESCRIPTOR).read_text())
    bodies[CONTEXT] = text[: text.index(f"}} {CONTEXT};")].rpartition("typedef struct {")[2]
    fields = [f"{name}.{field}" for name, body in bodies.items() for field in _declared(body)]
    assert len(bodies) == 3
    assert len(fields) > 35, "the headers are written another way"
    return sorted(fields)


def _declared(body: str) -> list[str]:
    """Names that a struct's body declares: the last word of each declarator."""
    declarators = [each for declaration in body.split(";") for each in declaration.split(",")]
    return [found[1] for each in declarators if (found := re.search(r"(\w+)\s*(?:\[\w+\])?\s*$", each))]


def _word_fields(headers: Headers) -> list[str]:
    """member.field of the descriptor's words."""
    text = _COMMENT.sub("", (headers.nccl / DESCRIPTOR).read_text())
    union = text[text.index("typedef union {") : text.index("} ncclGinProxyQword_t;")]
    found = [
        f"{member}.{field}"
        for body, member in _WORD.findall(union)
        for field in re.findall(r"(\w+)\s*(?::\s*\d+)?;", body)
    ]
    assert len(found) > 30, "the header is written another way"
    return found


def _word_source(words: list[str], storage: str) -> str:
    """A constant for each field, with all of its bits set and no other."""
    lines = []
    for i, each in enumerate(words):
        member, field = each.split(".")
        kind = f"decltype(ncclGinProxyQword_t::{member})"
        constexpr = f"constexpr {kind} made_{i}() {{ {kind} word{{}}; word.{field} = -1; return word; }}"
        lines += [constexpr, f'extern "C" {storage} {kind} word_{i} = made_{i}();']
        lines.append(f'extern "C" {storage} unsigned long long length_{i} = sizeof({kind});')
    return "\n" + "\n".join(lines) + "\n"
