"""One broken rule, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """One broken rule.

    Attributes:
        name: of the mutation.
        rule: what the code does wrong then.
        file: within the package.
        old: text that stands there exactly once; new: what replaces it.
        tests: files or tests, as pytest takes them, of which at least one must fail.
        num_ranks: how many rank processes they may have; two see most rules, and start in half the time.
    """

    name: str
    rule: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    num_ranks: int = 2

    def apply(self, package: Path) -> str:
        """The broken text of the file. Raises SystemExit if there is not exactly one place to break."""
        text = (package / self.file).read_text()
        if text.count(self.old) != 1:
            raise SystemExit(
                f"{self.name}: expected the following text once in {package / self.file}, "
                f"found it {text.count(self.old)} times; bring tests/mutation_list.py up to date\n{self.old}"
            )
        return text.replace(self.old, self.new)
