"""Invalid inputs for the parser and for a running server."""
