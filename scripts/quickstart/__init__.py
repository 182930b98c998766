"""A tour of distkeras in five acts, and a comparison of five update rules with plain Keras."""
