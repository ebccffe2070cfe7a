"""What traces of the authors' own code were recorded with, as transformations of ours."""

import collections
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax


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
    # `(state, step) -> state` before a step, from what the trace has recorded: where rounding
    # grows from step to step, each step is replayed from the authors' own state.
    restart: Callable[[Any, int], Any] = lambda state, step: state


def cocktail(meta: dict, trace) -> Setting:
    """CocktailSGD, whose code keeps the consensus and all that it compresses in float16."""
    import jaxcomp
    from tests.helpers import authors

    tx = jaxcomp.cocktail_sgd(
        optax.sgd(meta["lr"]),
        "replica",
        compressor=authors.half_two_shot(authors.cocktail_compressor(meta["env"])),
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
        compressor=authors.one_bit(authors.per_tensor),
        deviations=None,
        weight_decay=config["weight_decay"],
    )
    return Setting(tx, first=1, multiple=32)


def zero_one_adam(meta: dict, trace) -> Setting:
    """DeepSpeed's ZeroOneAdam from its freeze on: when it exchanged is read from the trace.

    Before the freeze its steps are in NumPy alone, which finds the state that ours begins with.
    """
    import jaxcomp
    from jaxcomp.methods.moments import NONE
    from tests.helpers import authors, deepspeed_numpy

    config = meta["config"]
    first, multiple = config["var_freeze_step"] + 1, 32
    at_freeze = {
        name: [*deepspeed_numpy.of_tensor(trace, name)][first - 1] for name in named(trace, "x0")
    }
    buffer = next(trace[key] for key in trace.files if key.startswith("u_w1"))
    meets = jnp.asarray(np.all(buffer == 0, axis=tuple(range(1, buffer.ndim)))[first:])
    rates = jnp.asarray(trace["lr"])[first:]
    tx = jaxcomp.zero_one_adam(
        lambda count: rates[count],
        "replica",
        *config["betas"],
        config["eps"],
        sync_at=lambda count: meets[count],
        variance_at=jaxcomp.schedules.never,
        compressor=authors.one_bit(authors.per_tensor),
        deviations=NONE._replace(fresh_variance=True),
    )

    def restart(state, step):
        if step > first:
            return state
        flat = lambda x: jnp.asarray(np.pad(x.reshape(-1), (0, -x.size % multiple)))
        of = lambda array: collections.OrderedDict((k, array(x)) for k, x in at_freeze.items())
        rows = of(lambda found: jnp.stack([*map(flat, found.momentum)]))
        return state._replace(momentum=rows, variance=of(lambda found: flat(found.variance)))

    return Setting(tx, first=first, multiple=multiple, restart=restart)


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
        trust=jaxcomp.TrustRatio((config["min_coeff"], config["max_coeff"])),
        deviations=None,
        # Tensors follow each other in the order of the trace.
        compressor=authors.one_bit(jaxcomp.sign(block=1024), order=None),
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
    sizes = {name: (x.size,) for name, x in named(trace, "x0").items()}
    tx = jaxcomp.slamb(
        config["lr"],
        "replica",
        **adam_options(meta),
        rescaling=jaxcomp.Rescaling(b3=config["beta3"], step_bound=None),
        sync_every=lambda count: count % config["local_steps"] == 0,
        compressor=authors.masked_by(cut(trace["mask__same_on_all"], sizes)),
        exact_numel=config["grad_size_thr"],
    )
    return Setting(tx)


def demo(meta: dict, trace) -> Setting:
    """DeMo of its authors."""
    import jaxcomp

    config = meta["config"]
    tx = jaxcomp.demo(
        config["lr"],
        "replica",
        decay=config["compression_decay"],
        top=config["compression_topk"],
        tile=config["compression_chunk"],
        weight_decay=config["weight_decay"],
    )
    return Setting(tx)


def power_sgd(meta: dict, trace) -> Setting:
    """torch's PowerSGD hook, before SGD: both sides a step, from the factors of the trace."""
    import jaxcomp

    config = meta["config"]
    mean = jaxcomp.power_sgd(
        config["matrix_approximation_rank"],
        "replica",
        warmup_steps=config["start_powerSGD_iter"],
        # A leaf of just as many elements as its factors is exact there, and not here.
        least=config["min_compression_rate"] * (1 + 2**-20),
        sides="both",
    )
    start = named(trace, "q0")

    def init(params):
        state = mean.init(params)
        right = {k: q if q is None else jnp.asarray(start[k]) for k, q in state.right.items()}
        return state._replace(right=collections.OrderedDict(right))

    # Tensors lie in the hook's bucket from the last to the first; of errors, the exact ones too.
    shapes = {name: x.shape for name, x in reversed(named(trace, "x0").items())}
    errors = cut(trace["error"], shapes)
    memory = {key.partition("__")[0]: trace[key] for key in trace.files}["q_memory"]
    factors = cut(memory, {name: start[name].shape for name in shapes if name in start})

    def restart(state, step):
        if step <= config["start_powerSGD_iter"]:
            return state
        of = lambda arrays: collections.OrderedDict(
            (name, jnp.asarray(arrays[name][step - 1]) if name in start else None)
            for name in reversed(shapes)
        )
        return optax.tree_utils.tree_set(state, residual=of(errors), right=of(factors))

    tx = optax.GradientTransformationExtraArgs(init, mean.update)
    return Setting(optax.chain(tx, optax.sgd(meta["lr"])), restart=restart)


def cut(flat: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Tensors that lie behind each other along the last axis."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = np.split(flat, ends[:-1], axis=-1)
    lead = flat.shape[:-1]
    return {n: x.reshape(*lead, *s) for (n, s), x in zip(shapes.items(), parts, strict=True)}


def adam_options(meta: dict) -> dict[str, float]:
    """Arguments that methods of the Adam family have in common."""
    config = meta["config"]
    b1, b2 = config["betas"]
    return {"b1": b1, "b2": b2, "eps": config["eps"], "weight_decay": config["weight_decay"]}


SETTINGS = {
    "CocktailSGD": cocktail,
    "DeMo": demo,
    "Lamb": lamb,
    "OneBitAdam": one_bit_adam,
    "OneBitLamb": one_bit_lamb,
    "Slamb": slamb,
    "powerSGD_hook": power_sgd,
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
