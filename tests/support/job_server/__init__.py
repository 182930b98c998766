"""What the tests of the job server share: servers, drivers that train nothing, a database."""
