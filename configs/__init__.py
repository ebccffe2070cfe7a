"""Training runs, one per file; `shapes` has runs that are too large to train here."""
