"""The trainer as a Spark ML estimator, and what it fits as a Spark ML model.

Importing this package loads pyspark, and neither Keras nor a backend.
"""
