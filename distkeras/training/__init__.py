"""One training job on Spark: the action, the tasks, the server's supervision, and what the driver watches."""
