"""The steps that are compiled for accelerators: methods and models by name, as `train` runs them.

All arrays are abstract. A sequence has 128 tokens and each device one of them, so that what the
exchange needs is not hidden by activations: figures of a method are differences to the dense step.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from benchmarks.accelerators_devices import DEVICES
from train.config import Config, Data, Optimizer
from train.config.run import AXIS_NAME
from train.models.decoder import DecoderConfig
from train.placement import build
from train.placement.devices import FAST_AXIS
from train.placement.resolve import resolve

TOKENS = 128
"""Of a sequence in the programs that are compiled; the roofline counts those of its own batch."""

_TINY = DecoderConfig(layers=1, width=256, heads=4, context=TOKENS, vocab=1024, dtype="bfloat16")
MODELS: dict[str, DecoderConfig] = {
    "tiny": _TINY,
    "tiny-in-shards": _TINY,
    "toy": DecoderConfig(
        layers=4, width=768, heads=12, context=TOKENS, vocab=6720, dtype="bfloat16"
    ),
    "124m": DecoderConfig(
        layers=12, width=768, heads=12, context=1024, vocab=50_257, dtype="bfloat16"
    ),
    "124m-scan": DecoderConfig(
        layers=12, width=768, heads=12, context=1024, vocab=50_257, dtype="bfloat16", scan=True
    ),
    "1.3b": DecoderConfig(
        layers=24, width=2048, heads=32, context=1024, vocab=50_272, dtype="bfloat16", scan=True
    ),
    "20b": DecoderConfig(
        layers=44, width=6144, heads=64, context=1024, vocab=50_432, dtype="bfloat16", scan=True
    ),
}
IN_SHARDS = ("tiny-in-shards", "20b")
"""Models whose parameters are sharded over the devices of a host."""


class Method(NamedTuple):
    """A row of the tables, as a config describes it."""

    update: str  # `optimizer.update`
    layered: bool = False  # whether it looks at one layer at a time
    qsdp: str | None = None


def _mean(code: str, optimizer: str = "adamw(learning_rate)") -> Method:
    return Method(f"chain(compressed_mean({code}, axis_name), {optimizer})")


_ALL_MATRICES = "exact=by_path(('bias|scale', True), ('.*', False))"
_MOMENTUM = "sgd(learning_rate, momentum=0.9)"
# Float32 moments of 20 B parameters do not fit into memory.
_LEAN = "adamw(learning_rate, mu_dtype='bfloat16')"

METHODS: dict[str, Method] = {
    "dense": _mean("identity()"),
    "dense_sgd": _mean("identity()", _MOMENTUM),
    "q8": _mean("quantize(8)"),
    "q4": _mean("quantize(4)"),
    "sign": _mean("sign(block=128)", _MOMENTUM),
    "top_k": _mean("top_k(0.125, block=4096)", _MOMENTUM),
    "group_top_1": _mean("group_top_1(8)", _MOMENTUM),
    "cocktail": Method("cocktail_sgd(adamw(learning_rate), axis_name)"),
    "cocktail_lean": Method(f"cocktail_sgd({_LEAN}, axis_name)"),
    "local_steps": Method("local_steps(adamw(learning_rate), axis_name, every=16)"),
    "power_sgd": Method(f"chain(power_sgd(4, axis_name), {_MOMENTUM})", layered=True),
    # The rows were measured with all matrices as factors, those of tokens and positions, too.
    "dion": Method(f"dion(learning_rate, axis_name, rank=64, {_ALL_MATRICES})", layered=True),
    "demo": Method("demo(learning_rate, axis_name)"),
    "one_bit_adam": Method("one_bit_adam(learning_rate, axis_name, freeze_step=100)"),
    "one_bit_lamb": Method("one_bit_lamb(learning_rate, axis_name, freeze_step=100)", layered=True),
    "zero_one_adam": Method("zero_one_adam(learning_rate, axis_name)"),
    "slamb": Method("slamb(learning_rate, axis_name)", layered=True),
    "sharded_optimizer": Method("sharded_optimizer(adamw(learning_rate), axis_name)"),
    "qsdp": Method("adamw(learning_rate)", qsdp="qsdp(axis_name, fast_axis=fast_axis)"),
}
WITH_MOMENTUM = tuple(name for name, method in METHODS.items() if _MOMENTUM in method.update)
"""Methods before momentum SGD, including "dense_sgd"."""


class Built(NamedTuple):
    """A step and the abstract arrays that it is lowered for."""

    config: Config
    mesh: Mesh
    init: Callable[[Any], tuple[Any, Any]]  # natural parameters -> params, state
    step: Any  # a jitted function, or like one
    params: Any
    state: Any
    batch: Any
    numel: int  # of the parameters of a replica


def has_fast_axis(method: Method) -> bool:
    """Whether a step of the method distinguishes the devices of a host from other hosts."""
    arguments = inspect.signature(jaxcomp.train_step).parameters
    return method.qsdp is not None or "fast_axis" in arguments


def model_for(device: str, model: str) -> DecoderConfig:
    """The named model, in a device's compute dtype."""
    return dataclasses.replace(MODELS[model], dtype=DEVICES[device].dtype)


def build_step(model: DecoderConfig, method: Method, mesh: Mesh, in_shards: bool = False) -> Built:
    """Makes the step of a method, for `lower`; nothing is computed.

    Args:
      model: Its size.
      method: Its update.
      mesh: Mesh of hosts, or of hosts and their devices. Where the method knows no fast axis, all
        devices are replicas alike.
      in_shards: Whether the parameters of a replica, which is a host, lie on all its devices.
    """
    if len(mesh.axis_names) > 1 and not (in_shards or has_fast_axis(method)):
        mesh = Mesh(mesh.devices.reshape(-1), (AXIS_NAME,), axis_types=mesh.axis_types[:1])
    return abstract_step(config_of(model, method, mesh, in_shards), mesh, batch_of(mesh))


def abstract_step(config: Config, mesh: Mesh, batch: Any = None) -> Built:
    """The step of a run of `train`, for `lower`; by default with the batch of the run."""
    functions = resolve(config).functions(mesh)
    natural = build.param_shapes(config)
    everywhere = jax.tree.map(lambda _: NamedSharding(mesh, P()), natural)
    places = functions.places(natural) if functions.places else everywhere
    like = jax.eval_shape(functions.init, _placed(natural, places))
    params, state = _placed(like, functions.shardings(natural))
    batch = build.batch_of(config, mesh) if batch is None else batch
    numel = sum(leaf.size for leaf in jax.tree.leaves(natural))
    return Built(config, mesh, functions.init, functions.step, params, state, batch, numel)


def config_of(model: DecoderConfig, method: Method, mesh: Mesh, in_shards: bool = False) -> Config:
    """The run of `train` whose step it is."""
    return Config(
        name="accelerators",
        steps=1000,
        replicas=mesh.size,
        fast=mesh.shape.get(FAST_AXIS, 1),
        in_shards=in_shards,
        per_layer=method.layered,
        optimizer=Optimizer(update=method.update, learning_rate=1e-3),
        qsdp=method.qsdp,
        model=model,
        data=Data(batch=mesh.size),
    )


def batch_of(mesh: Mesh, sequences: int = 1, tokens: int = TOKENS) -> jax.ShapeDtypeStruct:
    """A batch with this many sequences per device."""
    rows = NamedSharding(mesh, P(mesh.axis_names))
    return jax.ShapeDtypeStruct((mesh.size * sequences, tokens + 1), "int32", sharding=rows)


def _placed(like: Any, shardings: Any) -> Any:
    place: Callable = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(place, like, shardings)
