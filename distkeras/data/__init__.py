"""The data plane: columns of a DataFrame to mini-batches, in a reproducible order."""
