"""A Keras model as the rest sees it: an archive of bytes, a recipe to rebuild it, a replica that steps."""
