"""Fashion-MNIST on Spark under five update rules beside plain Keras."""
