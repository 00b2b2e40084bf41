"""Measurements of labkit beside its rivals: `python -m tests.bench.NAME [--json]`, or all by `python -m tests.bench`.

A module here that has a function `measure` is a bench; the others serve it.
"""
