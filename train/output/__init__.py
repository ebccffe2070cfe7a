"""Rows, figures and progress, of any run."""
