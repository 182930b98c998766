"""Faults planted in the sources, one at a time: the tests must find each of them."""
