"""Jobs with real worker processes and a plan of faults."""
