"""Runs with the sizes of papers, for `--report` and `--plan`; none has been trained."""
