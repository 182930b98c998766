"""Shared parts of tests that train with Keras, mostly on Spark: models, data, clusters, recorded jobs."""
