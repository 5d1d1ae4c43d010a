#!/usr/bin/env python3
"""Checks how the code is laid out: directions of imports, cycles, file sizes, who reads the environment.

    python tools/check_structure.py [root]

Prints every fault with its file and line; exit status 1 if there is any. Standard library only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "tokenloom"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("demo", "doctor", "cache_commands", "bench", "compat"),
    ("launch", "tune.profiler"),
    ("__init__",),  # the public names
    ("layer", "mega"),
    ("routed_experts",),
    ("mega_nvlink",),
    ("mega_reference",),
    ("communicator",),
    ("autograd", "checks"),
    ("experts",),
    ("activation",),
    ("backends", "reference", "gemm"),
    ("kernels.*",),
    ("kernels.shape",),  # what the host sides of kernels share
    ("symmetric",),
    ("jit", "device"),
    ("tune", "tune.choices", "tune.mega"),
    ("router", "routing", "quant", "saved", "compiled", "main_grads", "agreement"),
    ("plan", "group", "env", "strategy", "streams", "autocast"),
    ("errors",),
    ("_version",),
)
"""Modules and packages of tokenloom, top first. Each may import from lower lines only, and a package from itself;
not from its neighbours on the same line. ``kernels.*``: every folder of kernels is a package of its own, so that what
two kernels share has to move down. A module that is missing here is a fault: give it its place."""

ONLY: dict[str, tuple[str, ...]] = {"reference": ("torch", "plan", "errors")}
"""Modules that may import nothing else (besides the standard library): a mistake in what backends share with the
reference could not be seen by comparing the two."""

ENVIRONMENT_READER = "env"
"""The only module that may touch environment variables."""

MAX_LINES = 600
CODE_FOLDERS = (PACKAGE, "tests", "tools", "bench", "examples")
CODE_SUFFIXES = (".py", ".cuh", ".cu")


@dataclass(frozen=True)
class Import:
    """``target``: a dotted name within the package ("" is its ``__init__``), or the name of another package."""

    target: str
    inside: bool
    line: int


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    faults = check(root)
    for fault in faults:
        print(fault)
    print(f"structure: {len(faults)} faults" if faults else "structure: fine")
    return 1 if faults else 0


def check(root: Path) -> list[str]:
    """Every fault below ``root``, the folder that holds the package."""
    modules = find_modules(root / PACKAGE)
    if not modules:
        return [f"{root / PACKAGE}: no modules here"]
    imports = {name: list(imports_of(name, path, set(modules))) for name, path in modules.items()}
    faults: list[str] = []
    for name, path in modules.items():
        where = path.relative_to(root)
        faults += wrong_directions(name, where, imports[name])
        faults += environment_reads(name, where, path)
    faults += cycles(imports)
    for folder in CODE_FOLDERS:
        faults += long_files(root, root / folder)
    return faults


def find_modules(package: Path) -> dict[str, Path]:
    """Dotted name within the package -> file; a package's ``__init__`` has the name of its folder."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


def imports_of(name: str, path: Path, modules: set[str]) -> Iterator[Import]:
    """All imports, also those inside functions and under TYPE_CHECKING: they tie the same knots."""
    parents = [PACKAGE, *package_of(name, path)]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*parents[: len(parents) - node.level + 1], *base.split(".")]).rstrip(".")
            found = [_import(f"{base}.{alias.name}", node.lineno) for alias in node.names]
            names = [each for each in found if not (each.inside and each.target in modules)]
            yield from (each for each in found if each not in names)
            if names:
                yield _import(base, node.lineno)


def package_of(name: str, path: Path) -> list[str]:
    """The package that relative imports of this module start from."""
    if name == "__init__":
        return []
    return name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]


def _import(dotted: str, line: int) -> Import:
    first, _, rest = dotted.partition(".")
    return Import(rest or "__init__", True, line) if first == PACKAGE else Import(first, False, line)


def place_of(name: str) -> tuple[int, str] | None:
    """(line of the table, package that may import from itself) of a module; None if the table lacks it."""
    found = None
    for index, line in enumerate(LAYERS):
        for entry in line:
            if entry.endswith(".*"):
                parts = name.split(".")
                package = ".".join(parts[: entry.count(".") + 1])
                if found is None and (name == entry[:-2] or name.startswith(entry[:-1])):
                    found = index, package
            elif name == entry or name.startswith(f"{entry}."):
                return index, entry  # named in full: before any pattern
    return found


def wrong_directions(name: str, where: Path, imports: list[Import]) -> Iterator[str]:
    place = place_of(name)
    if place is None:
        yield f"{where}: {PACKAGE}.{name} has no place in LAYERS of tools/check_structure.py; give it one"
        return
    for each in imports:
        allowed = ONLY.get(name)
        standard = not each.inside and (each.target in sys.stdlib_module_names)
        if allowed is not None and not standard and each.target not in allowed:
            yield f"{where}:{each.line}: {name} imports {each.target}, it may import only {', '.join(allowed)}"
        if not each.inside:
            continue
        target = place_of(each.target)
        if target is None:
            yield f"{where}:{each.line}: imports {PACKAGE}.{each.target}, which has no place in LAYERS"
        elif target[1] != place[1] and target[0] <= place[0]:
            side = "its neighbour" if target[0] == place[0] else "which is above it"
            yield f"{where}:{each.line}: {name} imports {each.target}, {side}; imports point down the table LAYERS"


def cycles(imports: dict[str, list[Import]]) -> Iterator[str]:
    """Only packages can hold some, the table forbids all others."""
    graph = {name: sorted({each.target for each in found if each.inside}) for name, found in imports.items()}
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> Iterator[str]:
        if name in trail:
            yield f"cycle of imports: {' -> '.join([*trail[trail.index(name) :], name])}"
            return
        if name in done or name not in graph:
            return
        for target in graph[name]:
            yield from visit(target, [*trail, name])
        done.add(name)

    for name in graph:
        yield from visit(name, [])


def environment_reads(name: str, where: Path, path: Path) -> Iterator[str]:
    if name == ENVIRONMENT_READER:
        return
    names = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        attribute = isinstance(node, ast.Attribute) and node.attr in names
        imported = (
            isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names)
        )
        if attribute or imported:
            line = node.lineno  # type: ignore[attr-defined]
            yield f"{where}:{line}: touches environment variables; only {PACKAGE}/{ENVIRONMENT_READER}.py may"


def long_files(root: Path, folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in CODE_SUFFIXES and path.is_file():
            lines = len(path.read_text().splitlines())
            if lines > MAX_LINES:
                yield f"{path.relative_to(root)}: {lines} lines, at most {MAX_LINES}; split it"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
