"""Constants in a cubin, read by its ELF symbol table: what only device headers know reaches the host without a GPU."""

from __future__ import annotations

import struct

from tokenloom.errors import KernelCompileError

_HEADER = struct.Struct("<16s24xQ10xHHH")  # e_ident, e_shoff, then e_shentsize, e_shnum, e_shstrndx
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2
_NO_BYTES = 8
"""Types of sections: a table of symbols, and one that has no bytes in the file because all of them are 0."""


def constant_bytes(cubin: bytes, name: str) -> bytes:
    """The bytes of an initialised variable, say of ``extern "C" __constant__ int name = 1``.

    Raises:
        KernelCompileError: the cubin has no such variable, or is no cubin.
    """
    try:
        found = _find(cubin, name.encode())
    except (struct.error, IndexError, ValueError) as error:
        raise KernelCompileError(f"the machine code is damaged ({error}); compile it again") from error
    if found is None:
        raise KernelCompileError(f"the machine code has no constant {name}; compile it again")
    return found


def _find(cubin: bytes, name: bytes) -> bytes | None:
    magic, start, size, count, _ = _HEADER.unpack_from(cubin)
    if not magic.startswith(b"\x7fELF\x02\x01"):
        raise ValueError("not a 64-bit ELF file")
    sections = [_SECTION.unpack_from(cubin, start + i * size) for i in range(count)]
    for _, kind, _, _, begin, num_bytes, names, *_ in sections:
        for at in range(begin, begin + num_bytes, _SYMBOL.size) if kind == _SYMBOL_TABLE else ():
            where, _, _, section, value, length = _SYMBOL.unpack_from(cubin, at)
            where += sections[names][4]
            if cubin[where : cubin.index(b"\0", where)] != name or not 0 < section < count:
                continue
            if sections[section][1] == _NO_BYTES:
                return bytes(length)
            found = cubin[sections[section][4] + value :][:length]
            if len(found) != length:
                raise ValueError(f"{name.decode()} ends behind the file")
            return found
    return None
