"""The REST interface of the job server, under ``/api/v1``, on Flask."""
