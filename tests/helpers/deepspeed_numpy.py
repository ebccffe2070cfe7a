"""DeepSpeed's ZeroOneAdam in NumPy, with all its workers: runs that no recorded trace holds."""

import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_ALIGN = 8  # bits of a byte, of which each worker's chunk of a message has whole ones


class Step(NamedTuple):
    """One tensor after a step of all workers."""

    x: np.ndarray  # f32[workers, ...], and so are the buffer and the momentum
    u: np.ndarray
    learns: bool  # whether its gradients were averaged exactly
    momentum: np.ndarray
    variance: np.ndarray  # f32[...]


def trace_of(trace) -> dict[str, np.ndarray]:
    """The run of a recorded trace: `u_*` and `x_*` of all workers after each step.

    Args:
      trace: Of DeepSpeed's ZeroOneAdam; its settings, first parameters, gradients and rates count.
    """
    found = {}
    for name in json.loads(str(trace["meta_json"]))["shapes"]:
        columns = zip(*of_tensor(trace, name), strict=True)
        found[f"x_{name}"], found[f"u_{name}"], learns, *_ = map(np.stack, columns)
    return found | {"engine_allreduce_before__same_on_all": learns}


def of_tensor(trace, name: str) -> Iterator[Step]:
    """The same of one tensor, with its moments."""
    config = json.loads(str(trace["meta_json"]))["config"]
    return run(config, trace[f"x0_{name}"], trace[f"g_{name}"], trace["lr"])


def run(config: dict, start: np.ndarray, grads: np.ndarray, rates: np.ndarray) -> Iterator[Step]:
    """Trains one tensor; each is exchanged by itself.

    Args:
      config: As DeepSpeed's, with all its keys.
      start: f32[...], equal on all workers.
      grads: f32[steps, workers, ...].
      rates: f64[steps].

    Yields:
      What is there after each step.
    """
    (b1, b2), eps, decay = config["betas"], config["eps"], config["weight_decay"]
    f32 = np.float32
    x = np.repeat(start[None], grads.shape[1], axis=0)
    m, u, v = np.zeros_like(x), np.zeros_like(x), np.zeros_like(start)
    errors = no_errors(x)
    every, learned, meets_every, apart, rate_sum = 1, 0, 1, 0, 0.0
    yield Step(x, u, True, m, v)  # The first step only makes buffers.
    for step, (g, rate) in enumerate(zip(grads[1:], rates[1:], strict=True), start=2):
        local = step > config["var_freeze_step"] + 1
        learns = not local and step % every == 0
        if learns:
            g = np.repeat(g.mean(axis=0, keepdims=True), len(g), axis=0)
            v = f32(b2) * v + f32(1 - b2) * g[0] * g[0]
            learned += 1
            if learned == config["var_update_scaler"]:
                every, learned = 2 * every, 0
        elif not local:
            g, errors = one_bit_mean(g, errors)
        m = f32(b1) * m + f32(1 - b1) * g
        root = np.sqrt(v) + f32(eps)
        change = -f32(rate) * (m / root + f32(decay) * x)
        x = x + change
        if local:
            u, rate_sum = u + change, rate_sum + rate
            if step % meets_every == 0:
                mean, errors = one_bit_mean(u * root, errors)
                x, m, u = x - u + mean / root, -mean / f32(rate_sum), np.zeros_like(u)
                rate_sum = 0.0
            apart += 1
            if apart == config["local_step_scaler"]:
                meets_every, apart = min(2 * meets_every, config["local_step_clipper"]), 0
        elif step == config["var_freeze_step"] + 1:
            errors = no_errors(x)
        yield Step(x, u, learns, m, v)


def no_errors(x: np.ndarray):
    """What workers and owners hold back of f32[workers, ...] at first, with the padding's."""
    workers = len(x)
    unit = workers * np.lcm(workers, _ALIGN)
    padded = -(-x[0].size // unit) * unit
    sizes = padded, padded // workers
    return tuple(np.zeros((workers, size), np.float32) for size in sizes)


def one_bit_mean(x: np.ndarray, errors):
    """The 1-bit all-reduce of f32[workers, ...], and the errors after it."""
    sent_error, owned_error = errors
    workers, padded = sent_error.shape
    values = x.reshape(workers, -1)
    values = np.pad(values, ((0, 0), (0, padded - values.shape[1]))) + sent_error
    sent = one_bit(values)
    total = sent.reshape(workers, workers, -1).mean(axis=0) + owned_error
    passed_on = one_bit(total)
    mean = passed_on.reshape(-1)[: x[0].size].reshape(x[0].shape)
    return np.broadcast_to(mean, x.shape), (values - sent, total - passed_on)


def one_bit(rows: np.ndarray) -> np.ndarray:
    """Signs, that of zero positive, times the root of the mean square of each row."""
    scale = np.sqrt(np.mean(np.square(rows, dtype=np.float64), axis=1, keepdims=True))
    scale = scale.astype(np.float32)
    return np.where(rows >= 0, scale, -scale)
