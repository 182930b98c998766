"""Shared parts of the tests: a folder for each part of the project, and modules for all of them."""
