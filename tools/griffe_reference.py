"""What griffe cannot know when it reads signatures and docstrings for the reference: what readers can look up.

A name that no page of the reference shows means nothing to its reader. So an alias of a type is shown as the type, a
constant as its value, and a class of the inside goes from a union; elsewhere it is ``Any``. References in docstrings
become links where a page shows what they name.
"""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from griffe import (
    Alias,
    Attribute,
    Class,
    Expr,
    ExprAttribute,
    ExprBinOp,
    ExprName,
    ExprSubscript,
    Extension,
    Function,
    Module,
    Object,
    Parameter,
    ParameterKind,
    get_annotation,
)

PACKAGE = "tokenloom"
DOCS = Path(__file__).parents[1] / "docs"
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([\w.]+)`")
PAGE = re.compile(r"(?<![\w:/])docs/([\w/-]+)\.md")
SEVERAL = re.compile(r"^ +[a-z]\w*(?:, [a-z]\w*)+: ", re.MULTILINE)
"""Several attributes in one entry. Griffe takes what is behind the first blank for a type."""
ANY = ExprName("Any", parent="typing")


class Reference(Extension):
    """Rewrites annotations, defaults and docstrings once the package is loaded."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Called by griffe for each package that it has loaded."""
        if pkg.name != PACKAGE:
            return
        listed = "\n".join(page.read_text() for page in sorted(DOCS.glob("reference/*.md")))
        self.package = pkg
        self.shown = {self.target(path).path for path in re.findall(rf"^::: {PACKAGE}\.(\S+)", listed, re.MULTILINE)}
        self.rewrite(pkg)

    def target(self, path: str) -> Object:
        """What a path inside the package leads to."""
        found = self.package[path]
        return found.final_target if isinstance(found, Alias) else found

    def rewrite(self, found: Object) -> None:
        if found.docstring:
            found.docstring.value = readable_docstring(found)
        if isinstance(found, Function):
            found.returns = self.readable(found.returns)
            for parameter in found.parameters:
                self.rewrite_parameter(parameter)
        elif isinstance(found, Attribute):
            found.annotation = self.readable(found.annotation)
            if found.parent and "dataclass" in found.parent.labels:  # a field: griffe makes a parameter of it
                found.value = self.readable(found.value, is_value=True)
        for member in found.members.values():
            if not isinstance(member, Alias):
                self.rewrite(member)

    def rewrite_parameter(self, parameter: Parameter) -> None:
        parameter.annotation = self.readable(parameter.annotation)
        several = parameter.kind in (ParameterKind.var_positional, ParameterKind.var_keyword)
        parameter.default = None if several else self.readable(parameter.default, is_value=True)

    def readable(self, expression: Any, alias: Attribute | None = None, *, is_value: bool = False) -> Any:
        """The same expression, in names that a reader knows. In an alias of a type, strings are types as well."""
        if isinstance(expression, ExprName | ExprAttribute):
            meant = self.inside(expression)
            if isinstance(meant, Attribute) and meant.value and "TypeVar" not in str(meant.value) and meant != alias:
                return self.readable(meant.value, None if is_value else meant, is_value=is_value)
            return ANY if isinstance(meant, Class) else expression
        if isinstance(expression, ExprBinOp) and expression.operator == "|":
            for side, other in ((expression.left, expression.right), (expression.right, expression.left)):
                if isinstance(self.inside(side), Class):
                    return self.readable(other, alias)
        if isinstance(expression, ExprSubscript) and expression.canonical_name in ("Annotated", "Literal"):
            return expression
        if isinstance(expression, Expr):
            parts = {each.name: getattr(expression, each.name) for each in fields(expression)}
            return type(expression)(
                **{name: self.readable(part, alias, is_value=is_value) for name, part in parts.items()}
            )
        if isinstance(expression, list):
            return [self.readable(each, alias, is_value=is_value) for each in expression]
        if isinstance(expression, str) and alias and expression[:1] in ("'", '"'):
            tree = ast.parse(ast.literal_eval(expression), mode="eval").body
            return self.readable(get_annotation(tree, parent=alias.module), alias)
        return expression

    def inside(self, expression: Any) -> Object | None:
        """What a name of the package means that no page shows."""
        path = expression.canonical_path if isinstance(expression, ExprName | ExprAttribute) else ""
        if not path.startswith(f"{PACKAGE}."):
            return None
        try:
            meant = self.target(path.removeprefix(f"{PACKAGE}."))
        except KeyError:  # an attribute of a value
            return None
        return None if {meant.path, meant.parent.path if meant.parent else ""} & self.shown else meant


def readable_docstring(found: Object) -> str:
    """A docstring with links to what it refers to, and no blanks between the names of one entry."""
    text = found.docstring.value if found.docstring else ""
    text = SEVERAL.sub(lambda names: names[0].rstrip().replace(", ", ",\N{NO-BREAK SPACE}") + " ", text)
    text = PAGE.sub(lambda page: link_to_page(page[1]), text)
    return ROLE.sub(lambda role: link_to_name(found, role[1]), text)


def link_to_page(path: str) -> str:
    """HTML of a reference to a document, from a page of the reference."""
    title = re.search(r"^# (.*)$", (DOCS / f"{path}.md").read_text(), re.MULTILINE)
    return f'<a href="../{path}.html">{title[1] if title else path}</a>'


def link_to_name(where: Object, name: str) -> str:
    """HTML of a reference to a full path, or to a neighbour. It is text alone where no page shows what it names."""
    room = where if isinstance(where, Class | Module) or where.parent is None else where.parent
    path = name if name.startswith(f"{PACKAGE}.") else f"{room.path}.{name}"
    in_class = re.search(r"[A-Z].*", name)
    short = in_class[0] if in_class else name.rpartition(".")[2]
    return f'<autoref identifier="{path}" optional><code>{short}</code></autoref>'
