"""The training of one model for each group of rows, on executors, and the storage of these models."""
