"""A simulation of whole jobs in virtual time: a seed determines the order of events, and faults occur at any point."""
