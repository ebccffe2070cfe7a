"""Checkpoints: what a run saves, and where it resumes."""
