"""The site of docs/, where what builds it is installed: no page needs another host, and signatures can be read."""

from __future__ import annotations

import builtins
import html
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not all(find_spec(each) for each in ("mkdocs", "material", "mkdocstrings_handlers")),
    reason="builds the documentation, which needs pip install -c constraints.txt -e '.[docs]'",
)

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?!a\b)[^>]*?\s(?:data|href|poster|src|srcset)=[\"']?((?:https?:)?//[^\"'\s>]+)")
"""What a browser fetches by itself. Links of readers are no such thing."""
LOADED_BY_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")
SIGNATURE = re.compile(r'<div class="[^"]*doc-signature[^"]*">.*?</code></pre>', re.DOTALL)
OTHERS = {"Any", "Callable", "Collection", "DeviceMesh", "DistributedDataParallel", "Iterable", "Iterator", "Literal"}
OTHERS |= {"Mapping", "NoReturn", "Optimizer", "Sequence", "T"}
"""Names that signatures have from Python and from torch, or that stand for any type."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as CI builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # Otherwise Material for MkDocs advertises what comes after it.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_asks_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    texts = {page: page.read_text() for page in pages}
    assert [(page.name, found) for page, text in texts.items() for found in LOADED.findall(text)] == []
    styles = [*site.rglob("*.css"), *site.rglob("*.svg"), *pages]
    assert [(file.name, found) for file in styles for found in LOADED_BY_STYLE.findall(file.read_text())] == []
    # The theme's script loads Mermaid from another host where a page has a diagram of it.
    assert [page.name for page, text in texts.items() if 'class="mermaid"' in text] == []


def test_search_works_in_local_files(site: Path) -> None:
    """There, browsers neither fetch the index nor start the search's worker."""
    assert (site / "search/search_index.js").read_text().startswith("var __index = ")
    assert 'src="js/iframe-worker.js"' in (site / "index.html").read_text()


def test_the_site_has_the_figures_alone(site: Path) -> None:
    drawn = sorted(file.name for file in (ROOT / "docs/figures").glob("*.svg"))
    assert sorted(file.name for file in (site / "figures").iterdir()) == drawn


def test_signatures_have_names_that_readers_can_look_up(site: Path) -> None:
    """A class or a constant that no page shows says nothing: tools/griffe_reference.py writes what it means."""
    texts = {page.name: page.read_text() for page in site.glob("reference/*.html")}
    shown = {found for text in texts.values() for found in re.findall(r'<h\d id="tokenloom\.(?:\w+\.)*(\w+)"', text)}
    assert {"Communicator", "Routed", "dispatch"} <= shown
    signatures = [(page, each) for page, text in texts.items() for each in SIGNATURE.findall(text)]
    assert len(signatures) > 100
    unknown = set()
    for page, signature in signatures:
        text = html.unescape(re.sub(r"<[^>]+>", "", signature))
        for name in re.findall(r"(?<![\w.])[A-Z_]\w*", re.sub(r"\"[^\"]*\"|'[^']*'", "", text)):
            if name not in shown | OTHERS and not hasattr(builtins, name):
                unknown.add((page, name))
    assert sorted(unknown) == []
