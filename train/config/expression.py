"""Optimizers as text: a call in a config, resolved without `eval`."""

import ast
import difflib
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import optax

import jaxcomp

MODULES = (optax, optax.contrib, jaxcomp, jaxcomp.schedules)
"""The modules whose names an expression may use."""

_DEEPEST = 50  # nested calls
_FORMS = (
    *(ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Attribute, ast.Load),
    *(ast.Constant, ast.Tuple, ast.List, ast.UnaryOp, ast.USub, ast.BinOp, ast.Div),
)


def evaluate(text: str, bindings: Mapping[str, Any]) -> Any:
    """Evaluates calls, names, numbers such as 1/64, strings, tuples and lists, and nothing else.

    A name is looked up in `bindings`, then in jaxcomp's public names, then in optax's. Dotted names
    are those of `MODULES`, such as `optax.contrib.muon`. Names that these modules import from
    elsewhere are not available, so text from a stranger can only call jaxcomp and optax.

    Args:
      text: One expression, such as `chain(clip_by_global_norm(1.0), adamw(learning_rate))`.
      bindings: Names that the text may use, with their values.

    Returns:
      The value of the expression.

    Raises:
      ValueError: If the text is not such an expression, a name is unknown, or a call does not
        accept its arguments.
    """
    return _value(parse(text), bindings)


def check(text: str, names: Mapping[str, Any]) -> None:
    """Checks an expression's form and that its names exist; calls nothing.

    Args:
      text: The expression, see `evaluate`.
      names: The bindings that `evaluate` will get; their values are not used.

    Raises:
      ValueError: If the text is not an expression that `evaluate` accepts, or a name is unknown.
    """
    tree = parse(text)
    inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inside:
            _value(node, names)


def parse(text: str) -> ast.expr:
    """Parses an expression of the form that `evaluate` accepts.

    Raises:
      ValueError: If it is not Python, or uses anything but calls and constants.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
        depth = _depth(tree)
    # Python's parser has several errors for deep nesting.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{text!r:.200} is not an expression ({error}); write one call, like "
            f"chain(clip_by_global_norm(1.0), adamw(learning_rate))."
        ) from error
    if depth > _DEEPEST:
        raise ValueError(f"{text!r:.200} nests {depth} deep; needs at most {_DEEPEST}.")
    for node in ast.walk(tree):
        unpacked = isinstance(node, ast.keyword) and node.arg is None
        if unpacked or not isinstance(node, _FORMS):
            part = "**" if unpacked else type(node).__name__
            raise ValueError(
                f"{text!r} holds {part}; write only calls, names, numbers, strings and lists."
            )
    return tree.body


def _depth(tree: ast.AST) -> int:
    level, depth = [tree], 0
    while level:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth += 1
    return depth


def _value(node: ast.expr, bindings: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple():
            return tuple(_value(item, bindings) for item in node.elts)
        case ast.List():
            return [_value(item, bindings) for item in node.elts]
        case ast.UnaryOp():
            return -_number(node.operand, bindings, node)
        case ast.BinOp():
            return _quotient(node, bindings)
        case ast.Name():
            return _named(node.id, bindings)
        case ast.Attribute():
            owner = _value(node.value, bindings)
            return _attribute(owner, node.attr, ast.unparse(node))
    return _call(node, bindings)


def _call(node: ast.Call, bindings: Mapping[str, Any]) -> Any:
    function = _value(node.func, bindings)
    args = [_value(arg, bindings) for arg in node.args]
    kwargs = {keyword.arg: _value(keyword.value, bindings) for keyword in node.keywords}
    try:
        return function(*args, **kwargs)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{ast.unparse(node)} cannot be called like this: {error}.") from error


def _quotient(node: ast.BinOp, bindings: Mapping[str, Any]) -> float:
    above, below = (_number(part, bindings, node) for part in (node.left, node.right))
    try:
        return above / below
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{ast.unparse(node)!r}: {error}.") from error


def _number(node: ast.expr, bindings: Mapping[str, Any], whole: ast.expr) -> int | float:
    value = _value(node, bindings)
    if not isinstance(value, int | float):
        raise ValueError(
            f"{ast.unparse(whole)!r}: only numbers are divided or have a sign; a schedule of the "
            "negative rate is scale_by_learning_rate(learning_rate)."
        )
    return value


def _public(module: ModuleType) -> dict[str, Any]:
    """A module's own names: those of jaxcomp and optax; other modules only if in `MODULES`."""

    def is_own(value):
        if isinstance(value, ModuleType):
            return value in MODULES
        return str(getattr(value, "__module__", "")).split(".")[0] in ("jaxcomp", "optax")

    names = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {name: value for name, value in names.items() if is_own(value)}


def _named(name: str, bindings: Mapping[str, Any]) -> Any:
    known = {"jaxcomp": jaxcomp, "optax": optax}
    for module in (optax, jaxcomp):
        known |= _public(module)
    known |= bindings
    if name not in known:
        raise ValueError(f"{name!r} is not a name of jaxcomp or optax; {_nearest(name, known)}.")
    return known[name]


def _attribute(owner: Any, name: str, text: str) -> Any:
    if not isinstance(owner, ModuleType):
        raise ValueError(f"{text!r}: only modules have names inside, like optax.contrib.")
    known = _public(owner)
    if name not in known:
        raise ValueError(f"{text!r} does not exist; {_nearest(name, known)}.")
    return known[name]


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"write {' or '.join(near)}" if near else "see the README's table of methods"
