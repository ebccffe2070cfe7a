"""What `benchmarks.scale` compares: methods by name, with pico's rates."""

import re

from benchmarks import methods, methods_beyond

# Methods of `benchmarks.convergence`, and nano's best learning rate, not tuned here.
TUNED_ON_NANO = {
    "dense Adam": ("dense Adam", 6e-3),
    "8 bits": ("8-bit Adam", 6e-3),
    "4 bits": ("4-bit Adam", 6e-3),
    "top_k": ("top_k Adam", 3e-3),
    "1 bit": ("sign Adam", 3e-3),
    "sharded Adam, 4 bits": ("sharded Adam, G4D4", 6e-3),
    "QSDP, 8 bits": ("QSDP W8G8", 6e-3),
    "QSDP, 4 bits, learned": ("QSDP W4G4, learned", 6e-3),
    **{
        f"QSDP, {bits} bits, embedding 8": (f"QSDP W{bits}G4, learned, embedding 8", 6e-3)
        for bits in (3, 4, 5, 6)
    },
    "QSDP, 4 bits, embedding's weights 8": ("QSDP W4G4, learned, embedding's weights 8", 6e-3),
    "CocktailSGD, no delay, 88x": ("CocktailSGD, no delay, 88x", 6e-3),
    "CocktailSGD, no delay, 10x": ("CocktailSGD, no delay, 10x", 6e-3),
    "CocktailSGD, 88x": ("CocktailSGD", 6e-3),
    "CocktailSGD, 10x": ("CocktailSGD, 10x", 6e-3),
    "dense LAMB": ("LAMB", 1.4e-2),
    "dense SGD": ("dense momentum SGD", 0.1),
    "0/1 Adam": ("0/1 Adam, warm-up, variances of 8 bits", 6e-3),
    "SLAMB": ("SLAMB", 1.4e-2),  # nano's 2e-2 diverges here
}
METHODS: dict[str, methods.Method] = {
    **{
        name: methods.METHODS[known]._replace(rates=(rate,))
        for name, (known, rate) in TUNED_ON_NANO.items()
    },
    # 15% of the steps are dense, as on nano.
    "1-bit Adam": methods.Method(
        "one_bit_adam(learning_rate, axis_name, freeze_step=1200)", (6e-3,)
    ),
    **methods_beyond.METHODS,
    # Rows of embeddings step as far as in dense Adam.
    "CocktailSGD, no delay, 88x, rare rows": methods.Method(
        "cocktail_sgd(rare_rows(adam(learning_rate), axis_name), axis_name, delayed=False)", (6e-3,)
    ),
    "DiLoCo, 4 bits, rare rows": methods.Method(
        "diloco(rare_rows(adam(learning_rate), axis_name), axis_name, every=16, code=quantize(4), "
        "outer_rate=0.7, outer_momentum=0.8)",
        (3e-3,),
    ),
}


# Dense training by what its inner optimizer is called in an update; the first that matches.
BASELINES = {
    "dense Muon": "muon|muloco|dion",
    "dense LAMB": "lamb",
    "dense SGD": r"\bsgd\(learning_rate",
    "dense Adam": "adam|demo",
}


def baseline_of(method: methods.Method) -> str:
    """The name of dense training with the method's inner optimizer."""
    for name, inside in BASELINES.items():
        if re.search(inside, method.update):
            return name
    raise ValueError(f"no baseline is known for {method.update!r}; add one to BASELINES.")
