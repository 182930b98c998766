"""Claims of papers, run again in the simulator, and the report of what came of them."""
