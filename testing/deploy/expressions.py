"""PromQL expressions of rules and panels: the series that they select, and the labels of their results.

Parsed with the promql-parser package (the Rust port of Prometheus' own grammar), which also checks types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set

import promql_parser as promql

LabelsOf = Callable[[promql.VectorSelector], Set[str]]
"""Returns the labels of the selected series, without their name."""

COMPARISONS = ("==", "!=", ">", "<", ">=", "<=")


def parse(text: str, *, variables: dict[str, str] | None = None) -> promql.Expr:
    """Parse an expression. ``variables`` replace a dashboard's ``$name``. Raises if a name is not among
    them."""
    for name, value in sorted((variables or {}).items(), key=lambda item: -len(item[0])):
        text = text.replace(f"${name}", value)
    if left := re.findall(r"\$\w+", text):
        raise ValueError(f"unknown variables {left} in {text}")
    return promql.parse(text)


def _children(expr: promql.Expr) -> list[promql.Expr]:
    match expr:
        case promql.BinaryExpr():
            return [expr.lhs, expr.rhs]
        case promql.AggregateExpr():
            return [expr.expr] + ([expr.param] if expr.param is not None else [])
        case promql.Call():
            return list(expr.args)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return [expr.expr]
        case promql.MatrixSelector():
            return [expr.vector_selector]
        case promql.VectorSelector() | promql.NumberLiteral() | promql.StringLiteral():
            return []
    raise TypeError(f"an expression of a kind that is not used yet: {type(expr).__name__}")


def nodes(expr: promql.Expr) -> Iterator[promql.Expr]:
    yield expr
    for child in _children(expr):
        yield from nodes(child)


def selectors(expr: promql.Expr) -> list[promql.VectorSelector]:
    return [node for node in nodes(expr) if isinstance(node, promql.VectorSelector)]


def result_labels(expr: promql.Expr, labels_of: LabelsOf) -> Set[str]:
    """Return the labels that a result of ``expr`` may have. Raises for labels in ``by``, ``without``, ``on``
    and ``ignoring`` that their operands can't have."""
    match expr:
        case promql.VectorSelector():
            return labels_of(expr)
        case promql.AggregateExpr():
            return _of_aggregation(expr, labels_of)
        case promql.BinaryExpr():
            return _of_operation(expr, labels_of)
        case promql.Call() if expr.func.name == "histogram_quantile":
            return result_labels(expr.args[1], labels_of) - {"le"}
        case promql.Call() if expr.func.name in ("vector", "time"):
            return frozenset()
    (child,) = _children(expr)
    return result_labels(child, labels_of)


def _of_aggregation(expr: promql.AggregateExpr, labels_of: LabelsOf) -> Set[str]:
    inner, modifier = result_labels(expr.expr, labels_of), expr.modifier
    if modifier is None:
        return frozenset()
    named = frozenset(modifier.labels)
    _require(named <= inner, expr, f"groups by {sorted(named - inner)}, which {sorted(inner)} lack")
    return named if modifier.type == promql.AggModifierType.By else inner - named


def _of_operation(expr: promql.BinaryExpr, labels_of: LabelsOf) -> Set[str]:
    sides = [None if _is_number(side) else result_labels(side, labels_of) for side in (expr.lhs, expr.rhs)]
    left, right = sides
    if left is None or right is None:
        return left or right or frozenset()
    matching = expr.modifier.matching if expr.modifier is not None else None
    if matching is not None:
        named = frozenset(matching.labels)
        _require(named <= left & right, expr, f"matches {sorted(named)} of {sorted(left)}, {sorted(right)}")
    else:
        _require(left == right, expr, f"matches {sorted(left)} with {sorted(right)}")
    return left | right if str(expr.op) == "or" else left


def _is_number(expr: promql.Expr) -> bool:
    if isinstance(expr, promql.Call) and expr.func.name == "time":
        return True
    return all(
        isinstance(node, promql.NumberLiteral | promql.ParenExpr | promql.UnaryExpr) for node in nodes(expr)
    )


def _require(condition: bool, expr: promql.Expr, problem: str) -> None:
    if not condition:
        raise ValueError(f"{problem}: {expr.prettify()}")


def defined(expr: promql.Expr) -> str:
    """Return the same expression with 0 or 1 in place of filtering comparisons, so that it has data even if
    no alert fires."""

    def answer(node: promql.Expr) -> promql.Expr | None:
        if not isinstance(node, promql.BinaryExpr) or str(node.op) not in COMPARISONS:
            return None
        return promql.parse(f"({node.lhs.prettify()}) {node.op} bool ({node.rhs.prettify()})")

    return promql.transform(expr, post_visit=answer).prettify()
