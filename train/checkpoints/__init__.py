"""Checkpoints of arrays: saved, checked, and read onto any mesh."""
