"""Whole jobs in virtual time, in orders that a seed says, with faults at any point of them."""
