"""What a Spark session says of its cluster, under Spark Connect too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def default_workers(df: DataFrame) -> int:
    """Spark's default parallelism.

    Raises:
        ConfigurationError: Spark Connect hides it.
    """
    from pyspark.errors import PySparkException

    try:
        return df.sparkSession.sparkContext.defaultParallelism
    except PySparkException:
        raise ConfigurationError("`num_workers` must be given under Spark Connect. Received: None") from None


def driver_host(df: DataFrame) -> str:
    """The driver's address for executors: loopback for a local master."""
    conf = df.sparkSession.conf
    master = str(conf.get("spark.master", "local"))
    if master.startswith("local") and not master.startswith("local-cluster"):
        return "127.0.0.1"
    return str(conf.get("spark.driver.host", "127.0.0.1"))
