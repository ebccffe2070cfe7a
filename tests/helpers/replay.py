"""`python -m tests.helpers.replay TRACE.npz ...`: replays a trace of the authors' own code.

A trace holds the gradients of all workers, and their parameters after each step. Prints each
step's largest error relative to the largest parameter; ends with 1 if one is above 1e-4.
"""

import collections
import functools
import pathlib
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.helpers.traces import named, setting_of

LIMIT = 1e-4


def errors(path: pathlib.Path) -> Iterator[float]:
    """Replays a trace.

    Yields:
      The largest difference of a parameter of any worker after each step, over the largest
      parameter of the trace.
    """
    from tests.helpers.replicas import everywhere, mesh_of, rows, transform

    trace = np.load(path)
    setting = setting_of(trace)
    start, grads, wanted = (named(trace, prefix) for prefix in ("x0", "g", "x"))
    if setting.first:
        start = {name: wanted[name][setting.first - 1, 0] for name in start}
    sizes = {name: x.size for name, x in start.items()}
    largest = max(np.abs(x).max() for x in wanted.values())
    num_steps, num_replicas = next(iter(grads.values())).shape[:2]
    shape = functools.partial(shaped, setting.multiple)
    # In the order of the trace, in which they follow each other on the wire.
    flat = collections.OrderedDict((name, shape(x)) for name, x in start.items())
    if setting.spare:
        flat["spare"] = np.zeros(setting.spare, np.float32)
    mesh = mesh_of(num_replicas)
    params = everywhere(mesh, jax.tree.map(lambda x: x.astype(setting.dtype), flat))
    init, update = transform(setting.tx, mesh, params)
    state = init(params)
    drift = optax.tree_utils.tree_get(state, "drift")
    if drift is not None:
        # What the shared parameters' dtype rounds off is this worker's own.
        lost = jax.tree.map(lambda x, p: x - np.asarray(p, x.dtype), flat, params)
        drift = jax.tree.map(lambda d, x: d + x[None], drift, lost)
        state = optax.tree_utils.tree_set(state, drift=drift)
    for step in range(setting.first, num_steps):
        local = collections.OrderedDict(
            (name, np.stack([*map(shape, grads[name][step])])) for name in start
        )
        if setting.spare:
            # A gradient that leaves the momentum as it is.
            local["spare"] = np.stack([state.momentum["spare"]] * num_replicas)
        state = setting.restart(state, step)
        updates, state = update(rows(mesh, local), state, params)
        params = optax.apply_updates(params, updates)
        if setting.multiple > 1:
            params, state = cleared((params, state), sizes)
        drift = optax.tree_utils.tree_get(state, "drift")
        worst = 0.0
        for name, x in wanted.items():
            got = np.asarray(params[name], np.float32)[None]
            got = got + (0.0 if drift is None else np.asarray(drift[name]))
            got = got.reshape(got.shape[0], -1)[:, : sizes[name]]
            worst = max(worst, np.abs(got - x[step].reshape(x.shape[1], -1)).max())
        yield float(worst / largest)


def shaped(multiple: int, x: np.ndarray) -> np.ndarray:
    """A tensor as it is, or as a vector with room behind it."""
    return x if multiple == 1 else np.pad(x.reshape(-1), (0, -x.size % multiple))


def cleared(tree, sizes):
    """Zeros in the room behind the tensors of parameters and state, but for the residuals."""

    def clear(path, x):
        names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
        if names[-1] not in sizes or "residual" in names:
            return x
        return jnp.where(jnp.arange(x.shape[-1]) < sizes[names[-1]], x, 0).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(clear, tree)


def main(paths: list[str]) -> int:
    """Prints the errors of every trace; returns the exit status."""
    if not paths:
        print("usage: python -m tests.helpers.replay TRACE.npz ...", file=sys.stderr)
        return 2
    worst = 0.0
    for path in paths:
        for step, error in enumerate(errors(pathlib.Path(path))):
            print(f"{path}: step {step}: {error:.1e}")
            worst = max(worst, error)
    print(f"largest error relative to the largest parameter: {worst:.1e} (limit {LIMIT:.0e})")
    return int(not worst <= LIMIT)


if __name__ == "__main__":
    from train.placement import devices

    devices.start(8)
    sys.exit(main(sys.argv[1:]))
