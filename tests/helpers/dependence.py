"""Which arguments of a traced program each of its messages depends on."""

import jax
from jax.extend.core import Literal

from jaxcomp.replicas.types import is_message


def messages(function, *args):
    """`(name, set of paths of array arguments)` of each collective, in the program's order.

    A branch, a loop and a barrier wait for all that they get.
    """
    traced = jax.make_jaxpr(function)(*args)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(args)]
    found = []
    _walk(traced.jaxpr, [frozenset([path]) for path in paths], frozenset(), found)
    return found


def _walk(jaxpr, given, waits, found):
    """What each result depends on; `waits` is what all equations do."""
    known = dict(zip(jaxpr.invars, given, strict=True))
    known |= {var: frozenset() for var in jaxpr.constvars}
    of = lambda x: frozenset() if isinstance(x, Literal) else known[x]
    for eqn in jaxpr.eqns:
        operands = [of(x) for x in eqn.invars]
        every = frozenset().union(waits, *operands)
        results = [every] * len(eqn.outvars)
        if is_message(eqn):
            found.append((eqn.primitive.name, every))
        elif eqn.primitive.name == "cond":
            for branch in eqn.params["branches"]:
                _walk(branch.jaxpr, operands[1:], every, found)
        elif "jaxpr" in eqn.params and eqn.primitive.name not in ("while", "scan"):
            inner = eqn.params["jaxpr"]
            results = _walk(getattr(inner, "jaxpr", inner), operands, waits, found)
        known |= zip(eqn.outvars, results, strict=True)
    return [of(x) | waits for x in jaxpr.outvars]
