"""The job server: REST under ``/api/v1``, on Flask."""
