"""Programs as compilers print them, and the meshes that run them."""

import jax
import numpy as np
from jax.sharding import Mesh

BOTH = ("data", "fsdp")
SUM = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def mesh_of_shape(*sizes, names=BOTH):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, names[: len(sizes)])


def program(body: str, more: str = "", num_partitions: int = 4, **arguments: str) -> str:
    """An entry of these lines and of arrays by name, behind other computations and a sum.

    Args:
      body: The entry's lines, the last of which is its root.
      more: Other computations.
      num_partitions: How many devices run it.
      **arguments: The entry's arrays, as `p="f32[8]"`.
    """
    given = ", ".join(f"{name}: {shape}" for name, shape in arguments.items())
    lines = [f"%{name} = {x} parameter({i})" for i, (name, x) in enumerate(arguments.items())]
    entry = "\n".join(f"  {line.strip()}" for line in [*lines, *body.strip().splitlines()])
    header = f"HloModule jit_step, is_scheduled=true, num_partitions={num_partitions}"
    return f"{header}\n\n{SUM}\n{more}\nENTRY %main ({given}) -> f32[8] {{\n{entry}\n}}\n"
