#!/usr/bin/env python3
"""Check how the code is laid out: directions of imports, cycles, private names, file sizes, environment variables.

    python tools/check_structure.py [root]

Prints every fault with its file and line. The exit status is 1 if there is any. Standard library only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "tokenloom"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli", "demo", "bench", "compat", "integrations"),
    ("training", "inference", "tune"),
    ("comm",),
    ("backends",),
    ("ops",),
    ("kernels",),
    ("runtime", "jit", "device"),
    ("plan", "errors", "env", "reference", "_version"),
)
"""The rooms of the package, top layer first. A room imports from its own layer and from lower ones.

Modules, and rooms of one layer, never import each other in a circle. A room that is missing here is a fault."""

ENTRANCES = ("__main__", "__init__")
"""The command line's entry and the public names: above the rooms that they open."""
ABOVE_THE_PUBLIC_NAMES = LAYERS[0]
"""Rooms that may import the public names themselves, as users do."""

SEPARATE = "kernels"
"""Each folder of this room is a kernel. Kernels do not import each other; what two share is in ``kernels.common``."""
SHARED_BY_KERNELS = "kernels.common"

ONLY: dict[str, tuple[str, ...]] = {"reference": ("torch", "plan", "errors")}
"""Modules that may import nothing else besides the standard library.

A mistake in what backends share with the reference could not be seen by comparing the two."""

ENVIRONMENT_READER = "env"
"""The only module that may touch environment variables."""

BACKEND_BLIND = ("comm", "training", "inference", "tune")
"""Rooms that ask what a backend can do, never which one it is."""
BACKEND_NAMES = ("nvlink", "collective", "network")

MAX_LINES = 800
CODE_FOLDERS = (PACKAGE, "tests", "tools", "microbench", "examples", "packages")
CODE_SUFFIXES = (".py", ".cuh", ".cu")


@dataclass(frozen=True)
class Import:
    """One import. ``target`` is a dotted name within the package, or the name of another package."""

    target: str
    inside: bool
    line: int
    names: tuple[str, ...] = ()


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
    trees = {name: ast.parse(path.read_text(), str(path)) for name, path in modules.items()}
    imports = {name: list(imports_of(name, path, trees[name], set(modules))) for name, path in modules.items()}
    privates = {name: private_definitions(tree) for name, tree in trees.items()}
    faults: list[str] = []
    for name, path in modules.items():
        where = path.relative_to(root)
        faults += wrong_directions(name, where, imports[name])
        faults += environment_reads(name, where, trees[name])
        faults += foreign_privates(name, where, trees[name], imports[name], privates)
        faults += backend_questions(name, where, trees[name])
    faults += cycles(imports)
    faults += cycles_of_rooms(imports)
    for folder in CODE_FOLDERS:
        faults += long_files(root, root / folder)
    return faults


def find_modules(package: Path) -> dict[str, Path]:
    """Dotted name within the package -> file. A package's ``__init__`` has the name of its folder."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


def room_of(name: str) -> str:
    return name.partition(".")[0]


def imports_of(name: str, path: Path, tree: ast.Module, modules: set[str]) -> Iterator[Import]:
    """All imports, also those inside functions and under TYPE_CHECKING: they tie the same knots."""
    parents = [PACKAGE, *package_of(name, path)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*parents[: len(parents) - node.level + 1], *base.split(".")]).rstrip(".")
            rest = []
            for alias in node.names:
                each = _import(f"{base}.{alias.name}", node.lineno)
                if each.inside and each.target in modules:
                    yield each
                else:
                    rest.append(alias.name)
            if rest:
                yield _import(base, node.lineno, tuple(rest))


def package_of(name: str, path: Path) -> list[str]:
    """The package that relative imports of this module start from."""
    if name == "__init__":
        return []
    return name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]


def _import(dotted: str, line: int, names: tuple[str, ...] = ()) -> Import:
    first, _, rest = dotted.partition(".")
    return Import(rest or "__init__", True, line, names) if first == PACKAGE else Import(first, False, line, names)


def layer_of(name: str) -> int | None:
    """The line of LAYERS that holds the module's room, None if none does."""
    room = room_of(name)
    return next((index for index, rooms in enumerate(LAYERS) if room in rooms), None)


def wrong_directions(name: str, where: Path, imports: list[Import]) -> Iterator[str]:
    layer = layer_of(name)
    if layer is None and name not in ENTRANCES:
        yield f"{where}: {PACKAGE}.{name} has no place in LAYERS of tools/check_structure.py; give it one"
        return
    for each in imports:
        allowed = ONLY.get(name)
        standard = not each.inside and each.target in sys.stdlib_module_names
        if allowed is not None and not standard and each.target not in allowed:
            yield f"{where}:{each.line}: {name} imports {each.target}, it may import only {', '.join(allowed)}"
        if not each.inside or layer is None:
            continue
        if each.target in ENTRANCES:
            public_values = each.names and set(each.names) <= {"__version__"}
            if room_of(name) not in ABOVE_THE_PUBLIC_NAMES and not public_values:
                yield f"{where}:{each.line}: {name} imports {each.target}, which is above it"
            continue
        target = layer_of(each.target)
        if target is None:
            yield f"{where}:{each.line}: imports {PACKAGE}.{each.target}, which has no place in LAYERS"
        elif target < layer:
            yield f"{where}:{each.line}: {name} imports {each.target}, which is above it; imports point down LAYERS"
        elif room_of(name) == room_of(each.target) == SEPARATE and not _kernels_may(name, each.target):
            cure = f"share through {SHARED_BY_KERNELS}"
            yield f"{where}:{each.line}: {name} imports {each.target}, another kernel; {cure}"


def _kernels_may(name: str, target: str) -> bool:
    ours, theirs = (".".join(each.split(".")[:2]) for each in (name, target))
    return theirs in (ours, SHARED_BY_KERNELS, SEPARATE)


def cycles(imports: dict[str, list[Import]]) -> Iterator[str]:
    """Modules that import each other in a circle."""
    graph = {name: sorted({each.target for each in found if each.inside}) for name, found in imports.items()}
    yield from _circles(graph)


def cycles_of_rooms(imports: dict[str, list[Import]]) -> Iterator[str]:
    """Rooms of one layer that import each other in a circle."""
    graph: dict[str, list[str]] = {}
    for name, found in imports.items():
        room = room_of(name)
        for each in found:
            target = room_of(each.target)
            if each.inside and target != room and layer_of(name) is not None and layer_of(name) == layer_of(target):
                graph.setdefault(room, []).append(target)
    yield from _circles({room: sorted(set(targets)) for room, targets in graph.items()})


def _circles(graph: dict[str, list[str]]) -> Iterator[str]:
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


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_definitions(tree: ast.Module) -> set[str]:
    """Private names that a module defines: functions, classes, fields, attributes of self, constants."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if is_private(name)}


def foreign_privates(
    name: str, where: Path, tree: ast.Module, imports: list[Import], privates: dict[str, set[str]]
) -> Iterator[str]:
    """Private names that another room defines: there they may be renamed without a thought for this room."""
    room = room_of(name)
    own = {each for module, names in privates.items() if room_of(module) == room for each in names}
    others = {each for module, names in privates.items() if room_of(module) != room for each in names} - own
    for each in imports:
        if each.inside and room_of(each.target) != room:
            for private in filter(is_private, each.names):
                yield f"{where}:{each.line}: imports {private} of {each.target}, which is private to its room"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in others:
            yield f"{where}:{node.lineno}: touches {node.attr}, which is private to another room"


def backend_questions(name: str, where: Path, tree: ast.Module) -> Iterator[str]:
    """Comparisons with the name of a backend, and isinstance of one."""
    if room_of(name) not in BACKEND_BLIND:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            values = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            if set(values) & set(BACKEND_NAMES):
                yield f"{where}:{node.lineno}: asks which backend it has; ask for a capability instead"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            named = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
            if any(each.endswith("Backend") for each in named):
                yield f"{where}:{node.lineno}: asks which backend it has; ask for a capability instead"


def environment_reads(name: str, where: Path, tree: ast.Module) -> Iterator[str]:
    if name == ENVIRONMENT_READER:
        return
    names = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    for node in ast.walk(tree):
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
