"""The center variable as a state machine: the server half of a rule, leases, rounds, the commit log."""
