"""Claims of papers, tested in the simulator, and the report of the results."""
