#!/usr/bin/env python3
"""Compare the machine code of every kernel variant with that of another checkout.

    python tools/compare_machine_code.py OTHER_TREE [--variants FILE] [--only TEXT] [--rename OLD=NEW ...]

A change that moves or renames device code, or puts a function around it, should not change what the GPU runs. Both
trees compile their variants with NVRTC, which needs no GPU. Variants are paired by name. For each pair that differs,
the tool prints instructions, registers and spilled bytes on both sides, and the opcodes whose numbers differ.

A tree says which variants it has in ``tests/kernels/variants.py``: ``VARIANTS`` maps names to objects whose ``spec()``
is a KernelSpec. ``--variants`` gives another file for a tree that lacks it.

The exit status is 0 if all pairs are the same, else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = "tests/kernels/variants.py"
INSTRUCTION_BYTES = 16
OPCODE_BITS = 12
"""Of an instruction of sm_90, the lowest ones."""


@dataclass(frozen=True)
class Code:
    """What a variant compiles to.

    Attributes:
        digest: hash of its instructions.
        opcodes: how often each opcode occurs, by number.
        registers: of a thread.
        spill_bytes: registers that did not fit, stored and loaded.
    """

    digest: str
    opcodes: dict[str, int]
    registers: int
    spill_bytes: int

    @property
    def instructions(self) -> int:
        """How many there are."""
        return sum(self.opcodes.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="root of the other checkout")
    parser.add_argument("--variants", type=Path, help="file that lists the other checkout's variants")
    parser.add_argument("--only", default="", help="compare variants whose names contain this text")
    parser.add_argument("--rename", action="append", default=[], help="OLD=NEW, text within names of the other's")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        json.dump(compiled(options.variants, options.only, options.rename), sys.stdout)
        return 0
    theirs = codes_of(options.other.resolve(), options.variants, options.only, options.rename)
    return report(codes_of(ROOT, None, options.only, []), theirs)


def codes_of(tree: Path, variants: Path | None, only: str, renames: list[str]) -> dict[str, Code]:
    """What a checkout's variants compile to, by name; a process of its own imports it."""
    file = (variants or tree / VARIANTS).resolve()
    if not file.exists():
        raise SystemExit(f"{file} does not exist; pass a list of the variants of {tree} by --variants")
    command = [sys.executable, __file__, str(tree), "--variants", str(file), "--only", only, "--child"]
    command += [f"--rename={pair}" for pair in renames]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=tree, env=environment)
    if done.returncode:
        raise SystemExit(f"the variants of {tree} cannot be compiled")
    return {name: Code(**code) for name, code in json.loads(done.stdout).items()}


def compiled(file: Path, only: str, renames: list[str]) -> dict[str, dict[str, Any]]:
    """What the variants of this process's checkout compile to."""
    from tokenloom.jit.compiler import Resources, compile_kernel

    def code(variant: Any) -> dict[str, Any]:
        cubin, log = compile_kernel(variant.spec())
        needs = Resources.from_log(log)
        digest, opcodes = hashlib.sha256(), Counter[str]()
        for text in machine_code(cubin):
            digest.update(text)
            for (low,) in struct.iter_unpack("<Q8x", text):
                opcodes[hex(low % (1 << OPCODE_BITS))] += 1
        return asdict(Code(digest.hexdigest(), dict(opcodes), needs.registers, needs.spill_bytes))

    variants = {}
    for name, variant in runpy.run_path(str(file))["VARIANTS"].items():
        for old, new in (pair.split("=", 1) for pair in renames):
            name = name.replace(old, new)
        if only in name:
            variants[name] = variant
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(variants, pool.map(code, variants.values()), strict=True))


def machine_code(cubin: bytes) -> Iterator[bytes]:
    """The sections of instructions of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_bytes) for i in range(count)]
    names = sections[names_index][4]
    for name, _, _, _, offset, size in sections:
        if cubin[names + name :].startswith(b".text."):
            yield cubin[offset : offset + size]


def report(ours: dict[str, Code], theirs: dict[str, Code]) -> int:
    """Print what differs; the exit status."""
    both = [name for name in ours if name in theirs]
    different = [name for name in both if ours[name].digest != theirs[name].digest]
    for name in different:
        before, now = theirs[name], ours[name]
        print(
            f"{name}: {before.instructions} -> {now.instructions} instructions, {before.registers} -> {now.registers} "
            f"registers, {before.spill_bytes} -> {now.spill_bytes} B spilled; {difference(before, now)}"
        )
    for where, names in (("here", set(ours) - set(theirs)), ("there", set(theirs) - set(ours))):
        if names:
            print(f"only {where}: {'; '.join(sorted(names))}")
    print(f"{len(both) - len(different)} of {len(both)} variants have the same machine code")
    return 1 if different or not both else 0


def difference(before: Code, now: Code) -> str:
    """Which opcodes occur more or less often; or that only their order and registers changed."""
    opcodes = sorted({*before.opcodes, *now.opcodes}, key=lambda text: int(text, 16))
    changes = {code: now.opcodes.get(code, 0) - before.opcodes.get(code, 0) for code in opcodes}
    text = ", ".join(f"{code} {change:+d}" for code, change in changes.items() if change)
    return f"opcodes {text}" if text else "the same opcodes in another order, or with other operands"


if __name__ == "__main__":
    sys.exit(main())
