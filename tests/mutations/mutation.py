"""One broken rule, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.mutations import device_code, python_code

PACKAGE = "tokenloom"


@dataclass(frozen=True)
class Mutation:
    """One broken rule.

    Attributes:
        name: Name of the mutation.
        rule: What the code does wrong then.
        target: Symbol of the package to break: ``ops.routing:ordered_sum``, ``backends.collective:Class.method``, or,
            in a header, ``kernels/combine/sum.cuh:sum_rows``.
        old: Code that stands there exactly once. Spaces, quotes, comments and line breaks do not matter.
        new: Code that replaces it.
        tests: Node ids of files or tests, of which at least one must fail.
        num_ranks: Size of the groups that the tests run on. Two ranks see most rules; a sum of two does not tell its
            order.
        gpu: Whether the tests need GPUs.
        needs: Package that the tests need, beside those of the extra "test". Without it they would be skipped.
    """

    name: str
    rule: str
    target: str
    old: str
    new: str
    tests: tuple[str, ...]
    num_ranks: int = 2
    gpu: bool = False
    needs: str = ""

    @property
    def symbol(self) -> str:
        return self.target.partition(":")[2]

    def file(self, root: Path) -> Path:
        """The file that holds the symbol, below the folder that holds the package."""
        name = self.target.partition(":")[0]
        if name.endswith(".cuh"):
            return root / PACKAGE / name
        path = root.joinpath(PACKAGE, *name.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def broken(self, root: Path) -> str:
        """The text of the file with the rule broken.

        Raises:
            SystemExit: There is not exactly one place to break.
        """
        file = self.file(root)
        language = device_code if file.suffix == ".cuh" else python_code
        try:
            return language.replace_in_symbol(file.read_text(), self.symbol, self.old, self.new)
        except (OSError, LookupError) as error:
            raise SystemExit(
                f"mutation {self.name}, {self.target}: {error}; bring tests/mutations up to date"
            ) from None


def M(
    name: str, rule: str, target: str, old: str, new: str, *tests: str, num_ranks: int = 2, gpu: bool = False,
    needs: str = "",
) -> Mutation:  # fmt: skip
    """Make a row of the tables in ``rules/``, whose columns are those of :class:`Mutation`."""
    return Mutation(name, rule, target, old, new, tests, num_ranks, gpu, needs)
