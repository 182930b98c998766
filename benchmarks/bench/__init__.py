"""Benchmarks, one module a section: each figure is compared with its limit and with the plain way to do it."""
