"""Benchmarks, one module a section: each figure beside its limit and beside the plain way to do it."""
