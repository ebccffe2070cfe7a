"""`python -m train.launch`: `python -m train` on many processes, through `jaxcomp.launch`."""
