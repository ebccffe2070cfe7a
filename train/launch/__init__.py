"""`python -m train.launch`: a run of many processes, here or on other hosts."""
