"""What the tests that train with Keras share, most of them on Spark: models, data, clusters, recorded jobs."""
