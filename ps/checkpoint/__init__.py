"""Snapshots of the center, and where they are stored."""
