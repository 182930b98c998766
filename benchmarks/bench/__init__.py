"""Benchmarks, one module for each section: each figure is compared with its limit and with a plain implementation."""
