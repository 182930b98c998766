"""A model for each group of rows: one key after another on executors, and what they leave behind."""
