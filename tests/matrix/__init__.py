"""A matrix of environments that runs the core tests with each version and backend that the metadata names."""
