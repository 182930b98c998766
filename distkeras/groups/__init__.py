"""Trains a model for each group of rows, one key after another on executors, and keeps the models."""
