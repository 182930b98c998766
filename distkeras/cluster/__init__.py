"""Spark as a job meets it: its slots, its Python, and what it raises, as typed errors."""
