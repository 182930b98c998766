"""The analysis of a job's tables or a simulation: metrics, plots, and gradients for the simulator."""
