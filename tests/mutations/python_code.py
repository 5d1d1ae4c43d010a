"""Replace one piece of Python inside one symbol of a module, whatever its spaces, quotes and line breaks."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
BLOCKS = ("body", "orelse", "finalbody")
"""Fields of a node that hold a list of statements."""


def replace_in_symbol(source: str, symbol: str, old: str, new: str) -> str:
    """The module with ``new`` in place of ``old`` inside ``symbol``.

    Args:
        source: Text of the module.
        symbol: Qualified name of a function, a class, or a variable of a module or class, such as ``Pool.start``.
        old: An expression, or statements that follow each other.
        new: What replaces it, of the same kind; empty stands for no statement.

    Raises:
        LookupError: The symbol is not there, or ``old`` does not stand in it exactly once.
    """
    tree = ast.parse(source)
    definitions = list(find_definitions(tree, symbol))
    if not definitions:
        raise LookupError(f"there is no {symbol}")
    expression = _as_expression(old)
    if expression is not None and _as_expression(new) is not None:
        found = sum(_replace_expression(each, ast.unparse(expression), new) for each in definitions)
    else:
        found = sum(_replace_statements(each, old, new) for each in definitions)
    if found != 1:
        raise LookupError(f"{symbol} should hold the following code once, it holds it {found} times:\n{old}")
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def find_definitions(tree: ast.Module, symbol: str) -> Iterator[Definition]:
    """Every definition of the qualified name: overloads have several."""
    scopes: list[ast.AST] = [tree]
    *parents, name = symbol.split(".")
    for parent in parents:
        scopes = [each for scope in scopes for each in _defined_in(scope) if _name_of(each) == parent]
    for scope in scopes:
        yield from (each for each in _defined_in(scope) if _name_of(each) == name)


def _defined_in(scope: ast.AST) -> Iterator[Definition]:
    """Definitions of a scope itself, also those under ``if`` and ``try``, but not inside other definitions."""
    for statement in (each for block in BLOCKS for each in getattr(scope, block, [])):
        if isinstance(statement, Definition):
            yield statement
        else:
            yield from _defined_in(statement)


def _name_of(definition: Definition) -> str:
    if isinstance(definition, ast.Assign | ast.AnnAssign):
        target = definition.target if isinstance(definition, ast.AnnAssign) else definition.targets[0]
        return ast.unparse(target)
    return definition.name


def _as_expression(code: str) -> ast.expr | None:
    try:
        return ast.parse(code.strip(), mode="eval").body
    except SyntaxError:
        return None


def _replace_expression(scope: ast.AST, old: str, new: str) -> int:
    """Replace every expression that reads like ``old``; how many there were."""
    found = 0

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            nonlocal found
            if isinstance(node, ast.expr) and ast.unparse(node) == old:
                found += 1
                return ast.parse(new.strip(), mode="eval").body
            return self.generic_visit(node)

    Replace().generic_visit(scope)
    return found


def _replace_statements(scope: ast.AST, old: str, new: str) -> int:
    """Replace every run of statements that reads like ``old``; how many there were."""
    wanted = [ast.unparse(each) for each in ast.parse(textwrap.dedent(old)).body]
    found = 0
    for node in list(ast.walk(scope)):
        for block in BLOCKS:
            statements = getattr(node, block, None)
            if not isinstance(statements, list):  # the two halves of a conditional expression are no lists
                continue
            texts = [ast.unparse(each) for each in statements]
            for start in reversed(range(len(texts) - len(wanted) + 1)):
                if texts[start : start + len(wanted)] == wanted:
                    found += 1
                    statements[start : start + len(wanted)] = ast.parse(textwrap.dedent(new) or "pass").body
    return found
