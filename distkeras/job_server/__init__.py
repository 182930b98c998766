"""The job server, which runs submitted jobs on Spark, and its client.

::

    distkeras serve --data /data                              # where Spark is

    client = Client("http://127.0.0.1:8571", token)           # on a laptop
    job = client.submit(model, "agn", data="/data/train.parquet", num_workers=4)
    trained = job.wait().model()

A job is sent as JSON and a ``.keras`` archive, without code and without pickle.
"""

from distkeras.job_server.client import JobClient as Client
from distkeras.job_server.client import RemoteJob as RemoteJob

__all__ = ["Client", "RemoteJob"]
