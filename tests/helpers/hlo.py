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


def loop(init=3, step=2, bound=12, direction="LT", config=""):
    """A loop over a counter, as XLA:CPU prints one, with a reduction in body and condition."""
    more = f"""%compare (x: s32[], y: s32[]) -> pred[] {{
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  ROOT %c = pred[] compare(%x, %y), direction={direction}
}}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %state = (s32[], f32[8]{{0}}) parameter(0)
  %step = s32[] constant({step})
  %i = s32[] get-tuple-element(%state), index=0
  %v = f32[8]{{0}} get-tuple-element(%state), index=1
  %next = s32[] add(%i, %step)
  %r = f32[8]{{0}} all-reduce(%v), replica_groups={{{{0,1}},{{2,3}}}}, to_apply=%add
  ROOT %out = (s32[], f32[8]{{0}}) tuple(%next, %r)
}}

%condition (held: (s32[], f32[8])) -> pred[] {{
  %held = (s32[], f32[8]{{0}}) parameter(0)
  %bound = s32[] constant({bound})
  %w = f32[8]{{0}} get-tuple-element(%held), index=1
  %norm = f32[8]{{0}} all-reduce(%w), replica_groups={{{{0,2}},{{1,3}}}}, to_apply=%add
  %j = s32[] get-tuple-element(%held), index=0
  ROOT %less = pred[] fusion(%j, %bound), kind=kLoop, calls=%compare
}}
"""
    body = f"""
  %init = s32[] constant({init})
  %copy = s32[] copy(%init)
  %start = (s32[], f32[8]{{0}}) tuple(%copy, %p)
  %loop = (s32[], f32[8]{{0}}) while(%start), condition=%condition, body=%body{config}
  ROOT %end = f32[8]{{0}} get-tuple-element(%loop), index=1
"""
    return program(body, more, p="f32[8]{0}", n="s32[]")
