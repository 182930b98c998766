"""Five update rules of the thesis, compared with plain Keras on Fashion-MNIST."""
