"""The documentation's own code: what users are told to write must run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_api_examples_run() -> None:
    """All python blocks of docs/api.md, in order, in one namespace, on a process alone."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL)
    assert len(blocks) >= 6
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(block, namespace)


def test_every_public_error_is_documented() -> None:
    """docs/errors.md is where users look an exception up."""
    from tokenloom import errors

    text = (ROOT / "docs/errors.md").read_text()
    names = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(names) >= 13
    assert [name for name in names if f"`{name}`" not in text and name != "TokenloomError"] == []


def test_links_between_documents_lead_somewhere() -> None:
    """Relative links in the README and docs point at files that exist."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
