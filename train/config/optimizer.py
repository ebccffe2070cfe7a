"""The optimizer of a run: an update as text, the learning rate, and its schedule."""

import dataclasses
import math
from typing import Literal

import optax

from train import checks
from train.config import expression

_BINDINGS = ("learning_rate", "axis_name", "steps", "warmup_steps")  # names in an update


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """How gradients are averaged and applied, and the learning rate.

    For example `chain(compressed_mean(quantize(4), axis_name), clip_by_global_norm(1.0),
    adamw(learning_rate))`. The place in the chain decides what is clipped: after compressed_mean
    the mean gradient, as here; before it this replica's local gradient.
    """

    update: str
    """Optax transformation: a call with jaxcomp's and optax's names, and learning_rate, axis_name,
    steps and warmup_steps."""
    learning_rate: float
    """Peak of the schedule, in update units per step; > 0."""
    warmup_steps: int = 0
    """Steps in which the rate rises linearly from 0 to the peak. As many as steps, or more, do not
    fit: then a tenth of steps."""
    schedule: Literal["cosine", "linear", "exponential", "constant"] = "cosine"
    """Form of the decay from the peak, from the end of the warm-up to the last step."""
    final_fraction: float = 0.1
    """Rate at the last step as a share of the peak, in [0, 1]; constant stays at the peak."""

    def __post_init__(self):
        checks.require_types(self, "optimizer.")
        checks.at_least(0, self, "warmup_steps", prefix="optimizer.")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"optimizer.learning_rate={self.learning_rate} must be positive and finite; "
                f"write 3e-3."
            )
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(
                f"optimizer.final_fraction={self.final_fraction} must be in [0, 1]; write 0.1."
            )
        if self.schedule == "exponential" and not self.final_fraction:
            raise ValueError(
                "optimizer.final_fraction=0 is never reached by optimizer.schedule=exponential; "
                "write --optimizer.final-fraction 0.1."
            )
        try:
            expression.check(self.update, dict.fromkeys(_BINDINGS))
        except ValueError as error:
            raise ValueError(f"optimizer.update: {error}") from error


def schedule(optimizer: Optimizer, steps: int) -> optax.Schedule:
    """Makes the learning rate schedule: linear warm-up from 0, then decay to the last step.

    Args:
      optimizer: Peak, warm-up, form and final fraction.
      steps: Optimizer steps of the run.

    Returns:
      An optax schedule, `step -> rate`; `learning_rate` at `warmup_steps` and
      `final_fraction` of it from `steps` on.
    """
    peak, decay_steps = optimizer.learning_rate, steps - optimizer.warmup_steps
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, optimizer.final_fraction),
        "linear": optax.linear_schedule(peak, peak * optimizer.final_fraction, decay_steps),
        "exponential": optax.exponential_decay(
            peak, decay_steps, optimizer.final_fraction, end_value=peak * optimizer.final_fraction
        ),
        "constant": optax.constant_schedule(peak),
    }[optimizer.schedule]
    if not optimizer.warmup_steps:
        return decay
    warmup = optax.linear_schedule(0.0, peak, optimizer.warmup_steps)
    return optax.join_schedules([warmup, decay], [optimizer.warmup_steps])


def transformation(
    optimizer: Optimizer, axis_name: str, steps: int
) -> optax.GradientTransformationExtraArgs:
    """Makes the optax transformation of `update`.

    Args:
      optimizer: The update, and the learning rate's schedule.
      axis_name: Name of the mesh axis of the replicas.
      steps: Optimizer steps of the run.

    Raises:
      ValueError: If a call in it does not accept its arguments, or it is not a transformation.
    """
    values = (schedule(optimizer, steps), axis_name, steps, optimizer.warmup_steps)
    value = expression.evaluate(optimizer.update, dict(zip(_BINDINGS, values, strict=True)))
    if not isinstance(value, optax.GradientTransformation):
        raise ValueError(
            f"optimizer.update={optimizer.update!r} is a {type(value).__name__}, not an "
            f"optax transformation; write chain(compressed_mean(...), adamw(learning_rate))."
        )
    return optax.with_extra_args_support(value)
