"""The documentation: its examples run, its links and paths lead somewhere, and it leaves nothing public out."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tokenloom as tl
from tests.conftest import Ranks
from tokenloom import errors
from tokenloom.runtime.processes import RankContext, RankPool

ROOT = Path(__file__).parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
NOTEBOOK = sorted((ROOT / "microbench/notebook").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "microbench/README.md", *NOTEBOOK, *SITE]
FOLDERS = ("tokenloom", "tests", "microbench", "tools", "docs", "examples")
"""A path in a document that begins with one of these must exist."""
NAMED = re.compile(r"(?<!:)\b(?:docs|microbench)/[\w/-]+\.md")
"""A document, as code names it."""
WHERE = ("one process", "four ranks")
"""Where examples run, as the comment at the top of their page says."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def examples(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def headings(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def places(page: Path) -> list[str]:
    found = re.match(r"(?:---\n.*?\n---\n)?<!-- examples: (.*?) -->\n", page.read_text(), re.DOTALL)
    return found[1].split(", ") if found else []


def pages_of(place: str) -> list[str]:
    return [name(page) for page in PAGES if place in places(page)]


def run_examples(page: str) -> None:
    """All blocks of a page, in order, in one namespace, as its reader builds up a program."""
    blocks = examples(ROOT / page)
    assert blocks
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        exec(block, namespace)


def run_examples_on_a_rank(context: RankContext, page: str, folder: str) -> None:
    """A page may write files where it runs, and end its process group, which the pool goes on with."""
    here, destroy = os.getcwd(), dist.destroy_process_group
    os.chdir(folder)
    dist.destroy_process_group = lambda *_: None
    try:
        run_examples(page)
    finally:
        dist.destroy_process_group = destroy
        os.chdir(here)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENLOOM_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("page", pages_of("one process"))
def test_examples_run_in_one_process(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Inductor compiles C++ for a minute, and the layer's own tests have it. Whether the graph breaks shows without.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    run_examples(page)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("page", pages_of("four ranks"))
def test_examples_run_on_four_ranks(page: str, folder: Path, pools: Callable[[str], RankPool]) -> None:
    pool = pools("cpu")
    Ranks(pool, pool.num_ranks).run(run_examples_on_a_rank, page, str(folder))


@pytest.mark.parametrize("page", [name(page) for page in PAGES])
def test_every_page_with_examples_says_where_they_run(page: str) -> None:
    """Otherwise nothing would run them."""
    found = places(ROOT / page)
    assert bool(found) == bool(examples(ROOT / page))
    assert set(found) <= set(WHERE)


@pytest.mark.parametrize("page", [name(page) for page in PAGES if examples(page, "py")])
def test_examples_that_need_gpus_use_names_that_exist(page: str) -> None:
    for block in examples(ROOT / page, "py"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tl":
                assert hasattr(tl, node.attr), f"{page} uses tl.{node.attr}"


@pytest.mark.parametrize("page", [name(page) for page in PAGES])
def test_links_and_paths_lead_somewhere(page: str) -> None:
    """mkdocs checks anchors; it knows nothing of files outside docs/."""
    file = ROOT / page
    for target in re.findall(r"\]\((?!http)([^)#\s]+)", file.read_text()):
        assert (file.parent / target).exists(), f"{page} links to {target}"
    for target in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", file.read_text()):
        assert (ROOT / target).exists(), f"{page} names {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_anchors_lead_to_headings(page: Path) -> None:
    """GitHub makes other anchors than mkdocs where a heading has a sign for "times". Names of code have none there."""
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        file = page.parent / target if target else page
        if file.suffix == ".md" and "." not in anchor:
            assert anchor in [anchor_of(heading) for heading in headings(file)], f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_sections_of_notebooks_exist(page: Path) -> None:
    """The site does not have the notebooks, so its pages name sections where others link to them."""
    for notebook, section in re.findall(r'`(microbench/notebook/\w+\.md)`,\ssection\s"([^"]+)"', page.read_text()):
        assert " ".join(section.split()) in headings(ROOT / notebook), f"{notebook}: {section}"


def test_documents_that_the_code_names_exist() -> None:
    """Behind a colon, as in owner/repository:docs/page.md, they are another project's."""
    files = [file for folder in FOLDERS for kind in ("py", "cuh", "md") for file in (ROOT / folder).rglob(f"*.{kind}")]
    named = [(file, target) for file in files for target in NAMED.findall(file.read_text())]
    assert len(named) > 5
    assert [f"{name(file)}: {target}" for file, target in named if not (ROOT / target).exists()] == []


def test_every_public_name_is_in_the_reference() -> None:
    """The site makes the API reference from docstrings, for the names that its pages list."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    listed = set(re.findall(r"^::: tokenloom\.([\w.]+)", pages, re.MULTILINE))
    assert {"errors", "tune.profiler.profile"} <= listed
    rest = set(tl.__all__) - set(vars(errors)) - {"__version__", "tune"}
    assert sorted(rest - listed) == []


def test_every_public_error_is_explained() -> None:
    """The table says what to do, which a docstring does not."""
    text = (ROOT / "docs/reference/errors.md").read_text()
    names = [each for each, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(names) >= 13
    assert [each for each in names if f"| `{each}` |" not in text and each != "TokenloomError"] == []


def test_every_environment_variable_is_documented() -> None:
    variables = set(re.findall(r"TOKENLOOM_\w+", (ROOT / "tokenloom/env.py").read_text()))
    assert variables
    text = (ROOT / "docs/reference/environment.md").read_text()
    assert [each for each in sorted(variables) if f"`{each}`" not in text] == []


def test_every_result_file_is_in_the_index() -> None:
    """A number whose origin nobody finds is no measurement."""
    index = (ROOT / "microbench/README.md").read_text()
    files = [file.name for file in (ROOT / "microbench/results").glob("*.json")]
    assert files
    assert [file for file in sorted(files) if f"`{file}`" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tables_are_whole(page: Path) -> None:
    """A blank line in a table makes text of the rows behind it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for first, second in re.findall(r"\n\n(\|.*)\n(.*)", text):
        assert re.fullmatch(r"[|: -]+", second), first


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100
