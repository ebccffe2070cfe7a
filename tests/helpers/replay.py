"""`python -m tests.helpers.replay TRACE.npz ...`: replays a trace of the authors' own code.

A trace holds the gradients of all workers, and their parameters after each step. Prints each
step's largest error relative to the largest parameter; ends with 1 if one is above 1e-4.
"""

import collections
import functools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

LIMIT = 1e-4


class Setting(NamedTuple):
    """What a trace was recorded with, as ours."""

    tx: optax.GradientTransformation
    dtype: Any = np.float32  # of the parameters that all workers share
    first: int = 0  # step of the trace that is our first one
    # If not 1, tensors are vectors, padded to a multiple of it; what is there is cleared after
    # each step, but for the residuals, which DeepSpeed's padding collects too.
    multiple: int = 1
    # Elements behind all tensors, which DeepSpeed sends with them but neither decays nor clears.
    spare: int = 0


def cocktail(meta: dict, trace) -> Setting:
    """CocktailSGD, whose code keeps the consensus and all that it compresses in float16."""
    import jaxcomp
    from tests.helpers import authors

    tx = jaxcomp.cocktail_sgd(
        optax.sgd(meta["lr"]),
        "replica",
        compressor=authors.cocktail_compressor(meta["env"]),
        exchange=authors.half_two_shot,
    )
    return Setting(tx, jnp.float16)


def one_bit_adam(meta: dict, trace) -> Setting:
    """DeepSpeed's OnebitAdam, which drops its first gradient but counts the step."""
    import jaxcomp
    from tests.helpers import authors

    config = meta["config"]
    rates = jnp.asarray(trace["lr"])[1:]
    tx = jaxcomp.one_bit_adam(
        lambda count: rates[count],
        "replica",
        *config["betas"],
        config["eps"],
        freeze_step=config["freeze_step"] - 1,
        compressor=authors.per_tensor,
        precondition=False,
        variance_floor=0.0,
        bias_correction=False,
        weight_decay=config["weight_decay"],
        exchange=authors.one_bit,
    )
    return Setting(tx, first=1, multiple=32)


def zero_one_adam(meta: dict, trace) -> Setting:
    """DeepSpeed's ZeroOneAdam: when it exchanged what is read from the trace itself."""
    import jaxcomp
    from tests.helpers import authors

    config = meta["config"]
    learns = jnp.asarray(trace["engine_allreduce_before__same_on_all"][1:].astype(bool))
    buffer = next(trace[key] for key in trace.files if key.startswith("u_w1"))
    meets = jnp.asarray(np.all(buffer == 0, axis=tuple(range(1, buffer.ndim)))[1:])
    rates = jnp.asarray(trace["lr"])[1:]
    tx = jaxcomp.zero_one_adam_deepspeed(
        lambda count: rates[count],
        "replica",
        *config["betas"],
        config["eps"],
        freeze_step=config["var_freeze_step"],
        sync_at=lambda count: meets[count],
        variance_at=lambda count: learns[count],
        compressor=authors.per_tensor,
        weight_decay=config["weight_decay"],
        exchange=authors.one_bit,
    )
    return Setting(tx, first=1, multiple=32)


def one_bit_lamb(meta: dict, trace) -> Setting:
    """DeepSpeed's OnebitLamb, which drops its first gradient but counts the step."""
    import jaxcomp
    from tests.helpers import authors

    config = meta["config"]
    rates = jnp.asarray(trace["lr"])[1:]
    numel = sum(x.size for x in named(trace, "x0").values())
    tx = jaxcomp.one_bit_lamb(
        lambda count: rates[count],
        "replica",
        **adam_options(meta),
        freeze_step=config["freeze_step"] - 1,
        trust_bounds=(config["min_coeff"], config["max_coeff"]),
        precondition=False,
        variance_floor=0.0,
        bias_correction=False,
        exchange=authors.one_bit,
    )
    return Setting(tx, first=1, spare=-numel % 32)


def lamb(meta: dict, trace) -> Setting:
    """LAMB of SLAMB's code, on the mean gradient: ours is optax's."""
    import jaxcomp

    mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    return Setting(optax.chain(mean, optax.lamb(meta["config"]["lr"], **adam_options(meta))))


def slamb(meta: dict, trace) -> Setting:
    """SLAMB's `Slamb`, with the masks of the trace; parameters meet after an interval's first."""
    import jaxcomp
    from tests.helpers import authors

    config = meta["config"]
    tx = jaxcomp.slamb(
        config["lr"],
        "replica",
        **adam_options(meta),
        b3=config["beta3"],
        sync_every=lambda count: count % config["local_steps"] == 0,
        compressor=authors.masked_by(slices_of(trace, trace["mask__same_on_all"])),
        exact_numel=config["grad_size_thr"],
    )
    return Setting(tx)


def adam_options(meta: dict) -> dict[str, float]:
    """Arguments that methods of the Adam family have in common."""
    config = meta["config"]
    b1, b2 = config["betas"]
    return {"b1": b1, "b2": b2, "eps": config["eps"], "weight_decay": config["weight_decay"]}


def slices_of(trace, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of each tensor in `[steps, numel]`, where they follow each other."""
    start = named(trace, "x0")
    ends = np.cumsum([x.size for x in start.values()])
    return dict(zip(start, np.split(rows, ends[:-1], axis=1), strict=True))


SETTINGS = {
    "CocktailSGD": cocktail,
    "Lamb": lamb,
    "OneBitAdam": one_bit_adam,
    "OneBitLamb": one_bit_lamb,
    "Slamb": slamb,
    "ZeroOneAdam": zero_one_adam,
}
"""By a word of the trace's `optimizer`."""


def named(trace, prefix: str) -> dict[str, np.ndarray]:
    """The arrays of all tensors: `x_w1`, or `x` where there is one tensor without a name."""
    arrays = {}
    for key in trace.files:
        name, _, same = key.partition("__")
        head, _, tensor = name.partition("_")
        if head == prefix:
            # What was the same on all workers is stored once.
            arrays[tensor] = trace[key][:, None] if same else trace[key]
    return arrays


def setting_of(trace) -> Setting:
    """Our transformation with the settings of a trace.

    Raises:
      ValueError: If the trace is of a method that is not replayed.
    """
    meta = json.loads(str(trace["meta_json"]))
    found = [SETTINGS[word] for word in meta["optimizer"].split() if word in SETTINGS]
    if not found:
        raise ValueError(
            f"the trace is of {meta['optimizer']!r}; what is replayed is {sorted(SETTINGS)}."
        )
    return found[0](meta, trace)


def errors(path: pathlib.Path, steps: int | None = None) -> Iterator[float]:
    """Replays a trace.

    Args:
      path: The trace.
      steps: How many of its steps; all by default.

    Yields:
      The largest difference of a parameter of any worker after each step, over the largest
      parameter of the trace.
    """
    from tests.helpers.replicas import everywhere, mesh_of, rows, transform

    trace = np.load(path)
    setting = setting_of(trace)
    start, grads, wanted = (named(trace, prefix) for prefix in ("x0", "g", "x"))
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
    for step in range(num_steps)[setting.first : steps]:
        local = collections.OrderedDict(
            (name, np.stack([*map(shape, grads[name][step])])) for name in start
        )
        if setting.spare:
            # A gradient that leaves the momentum as it is.
            local["spare"] = np.stack([state.momentum["spare"]] * num_replicas)
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
    from train.processes import devices

    devices.start(8)
    sys.exit(main(sys.argv[1:]))
