"""Notes for who chooses an update that is known to train badly."""

import ast

from train.config import expression

_COARSE = {"group_top_1", "random_k", "sign", "top_k"}
# Those that divide by the root of a second moment, by optax's names, `scale_by_` taken off.
_ADAPTIVE = {
    *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw"),
    *("adan", "amsgrad", "lamb", "nadam", "nadamw", "novograd", "radam", "rms", "rmsprop"),
    *("rss", "stddev", "yogi"),
}


def notes(update: str) -> list[str]:
    """Says which compressors of an update suit the optimizer that follows them badly.

    Sparse and 1-bit means of gradients arrive in bursts, also with error feedback, and bursts
    inflate a second moment. Only the text is read: a compressor behind the optimizer, or one of
    4 or 8 bits, gets no note.

    Args:
      update: The expression of the update, as in a config.

    Returns:
      One text for each `compressed_mean` that holds such a compressor, before such an optimizer.
    """
    tree = expression.parse(update)
    adaptive = [
        (_position(node), name)
        for node in ast.walk(tree)
        if (name := _name(node).removeprefix("scale_by_")) in _ADAPTIVE
    ]
    found = []
    for node in ast.walk(tree):
        behind = [name for place, name in adaptive if place > _position(node)]
        is_mean = isinstance(node, ast.Call) and _name(node.func) == "compressed_mean"
        if is_mean and behind and any(map(_is_coarse, ast.walk(node))):
            found.append(
                f"note: {ast.unparse(node)} in front of {behind[0]} trains badly: what arrives in "
                "bursts inflates the second moment that it divides by. Write quantize(4) or "
                "quantize(8); or sgd(learning_rate, momentum=0.9) behind this compressor; or use "
                "a method made for so few bits."
            )
    return found


def _is_coarse(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if _name(node.func) != "quantize":
        return _name(node.func) in _COARSE
    bits = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "bits")][:1]
    return bool(bits) and getattr(bits[0], "value", None) in (1, 2)


def _name(node: ast.AST) -> str:
    """The last part of a name: `adam` of `adam` and of `optax.adam`."""
    return getattr(node, "attr", getattr(node, "id", ""))


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
