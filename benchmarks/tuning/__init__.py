"""The figures of the page "Tuning": workers, windows and learning rates, in the simulator."""
