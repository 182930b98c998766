"""Runs jobs, each in its own process, with its own session, folder and log."""
