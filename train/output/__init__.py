"""The output of a run: rows, figures and reports."""
