"""What can be learned from a job's tables or a simulation: metrics, plots, gradients for the simulator."""
