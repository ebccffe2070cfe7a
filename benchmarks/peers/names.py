"""Names of weights in PyTorch and JAX; imports nothing, so that tests of either can use it."""


def path_of(name: str) -> str:
    """The path in `Decoder` of a parameter: `block_0/qkv/kernel` of `blocks.0.qkv.weight`."""
    path = name.replace("blocks.", "block_").replace(".", "/")
    if "norm" in path:
        return path.replace("weight", "scale")
    return path.replace("weight", "embedding" if path.startswith("embed") else "kernel")
