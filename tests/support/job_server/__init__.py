"""Shared parts of the job server's tests: servers, drivers that train nothing, a database."""
