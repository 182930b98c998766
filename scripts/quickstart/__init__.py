"""Fashion-MNIST on Spark under five update rules, compared with plain Keras."""
