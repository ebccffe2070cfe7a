"""Runs that are trained, one a file; `shapes` holds those that are too large for that."""
