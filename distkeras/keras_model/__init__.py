"""Keras models for the rest of the package: an archive of bytes, a recipe to rebuild it, a replica that trains."""
