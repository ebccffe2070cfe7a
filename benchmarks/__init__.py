"""Measurements: five suites that anybody can repeat, and `studies` of one question each.

`python -m benchmarks` lists the suites. Rows are in `results/`, see `rows`; methods in `methods`.
"""
