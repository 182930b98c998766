"""Inputs that nobody should send, to the parser and to a running server."""
