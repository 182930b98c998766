"""Paths and URIs as Hadoop takes them, whose texts are not escaped: ``%20`` is three characters of a name there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_to_bytes, urlsplit

from distkeras.ps.errors import ConfigurationError, headline
from distkeras.ps.world.places import is_uri

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Characters of a pattern: Spark would read every folder that matches.
_PATTERN = re.compile(r"[*?\[{\\]")


def hadoop_path(spark: SparkSession, place: str, argument: str) -> str:
    """Return the path for Hadoop of a folder that Arrow opens too, so that both have the same one.

    Args:
        spark: a classic session.
        place: an absolute path, or a URI.
        argument: the name of the caller's argument.

    Raises:
        ConfigurationError: the Java virtual machine cannot have such a name.
    """
    try:
        parts = urlsplit(place) if is_uri(place) else None
        path = place if parts is None else unquote_to_bytes(parts.path).decode()
        path.encode()
    except UnicodeError as error:
        raise ConfigurationError(f"`{argument}` must be in UTF-8, as Spark reads it. Received: {place!r}") from error
    if parts is not None and parts.scheme != "file":
        return f"{parts.scheme}://{parts.netloc}{path}"
    if ".." in Path(path).parts:  # Hadoop would drop the folder before it, also where that is a link
        path = str(Path(path).resolve())
    _require_java_name(spark, path, argument, place)
    # Spark would look for a path without a scheme in the cluster's default file system.
    return f"file://{path}"


def _require_java_name(spark: SparkSession, path: str, argument: str, place: str) -> None:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no other way to the virtual machine
    try:
        jvm.java.io.File(path).toPath()
    except (Py4JJavaError, PySparkException) as error:  # PySpark turns some of Java's errors into its own
        raise ConfigurationError(
            f"`{argument}` must have a name that Spark's Java virtual machine can write under its locale "
            f"(`LC_ALL`, which must be one of UTF-8 when Spark starts). Received: {place!r}: "
            f"{error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else headline(str(error))}"
        ) from error


def arrow_uri(path: str) -> str:
    """Return a path or URI that Spark was given as Arrow takes it, escaped."""
    if not is_uri(path):
        return path
    parts = path.partition("://") if "://" in path else path.partition(":")
    return f"{parts[0]}{parts[1]}{quote(parts[2], safe='/:@')}"


def require_no_pattern(path: str) -> str:
    """Return the argument ``path``; raise ConfigurationError if Spark takes it as a pattern when it reads."""
    if _PATTERN.search(path):
        raise ConfigurationError(
            "`path` must have none of the characters * ? [ { and \\, which Spark takes as a pattern of several paths "
            f"when it loads. Received: path={path!r}"
        )
    return path


def stage_path(spark: SparkSession, path: str) -> str:
    """Return the path of a stage that Spark writes or reads; a relative one of this machine is made absolute.

    Raises:
        ConfigurationError: it has characters that Spark takes as a pattern when it reads.
    """
    from distkeras.spark.cluster import context_of

    require_no_pattern(path)
    context = context_of(spark)
    if is_uri(path) or context is None:
        return path
    default = context._jsc.hadoopConfiguration().get("fs.defaultFS") or ""  # noqa: SLF001 - PySpark has no other way
    return str(Path(path).absolute()) if default.startswith("file:") else path
