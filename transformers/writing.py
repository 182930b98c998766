"""Stages on disk: as Spark ML has them, and written over under Spark Connect, too."""

from __future__ import annotations

from pyspark.ml.util import DefaultParamsWritable, DefaultParamsWriter, MLWriter

from distkeras.cluster.failures import short_errors
from distkeras.cluster.session import context_of


class StageWriter(MLWriter):
    """Spark ML's writer, which cannot overwrite where there is no JVM to ask."""

    @short_errors
    def save(self, path: str) -> None:
        """Saves below ``path``; in place of what is there, after `overwrite`."""
        if self.shouldOverwrite and context_of(self.sparkSession) is None:
            # What Spark overwrites a folder with leaves nothing of it, on whatever filesystem that is.
            self.sparkSession.createDataFrame([], "value string").write.mode("overwrite").text(path)
            self.saveImpl(path)
        else:
            super().save(path)


class ParamsWriter(StageWriter, DefaultParamsWriter):
    """Writes a stage that is parameters only."""


class ParamsWritable(DefaultParamsWritable):
    """A stage that is parameters only."""

    def write(self) -> MLWriter:
        """Writes Spark ML's metadata."""
        return ParamsWriter(self)  # type: ignore[arg-type]  # mixed into classes of parameters only
