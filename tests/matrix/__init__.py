"""The core of the tests under each version and backend that the metadata names."""
