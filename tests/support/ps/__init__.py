"""Shared parts of the parameter server's tests: toy models, servers, peers, transcriptions of papers."""
