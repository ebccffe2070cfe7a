"""Training steps of other libraries in PyTorch, to compare with ours.

They run in a Python of their own, which imports nothing of jaxcomp, JAX or `train`:

    python -m venv PEERS
    PEERS/bin/pip install "torch>=2.13" numpy einops deepspeed==0.19.6

The authors' code of four methods is not packaged. It is read from one folder, and is not part of
this project:

    git clone https://github.com/bloc97/DeMo             # at 0e48145
    git clone https://github.com/microsoft/dion          # at 0a059a4
    git clone https://github.com/DS3Lab/CocktailSGD      # at 4819ed7
    git clone https://github.com/hangxu0304/SLAMB        # at 7388495

Each is a function `(module, job, **options) -> Step`, see `base`; `names.PEERS` lists them.
"""
