"""Shared parts of commands that run Spark: a quiet console, files, the session, and the output of errors and Ctrl-C."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from distkeras import chatter
from distkeras.flags import SWITCH, TomlArgumentParser
from distkeras.keras_model import archive
from distkeras.ps.errors import VARIABLE, ConfigurationError, DistkerasError, headline
from distkeras.ps.world.files import file_system
from distkeras.spark.failures import innermost

if TYPE_CHECKING:
    import argparse

    import keras
    from pyspark.sql import DataFrame, SparkSession

#: The formats of ``--data``, and the options of Spark with which a format is read.
FORMATS = ("parquet", "csv", "orc", "json", "table")
OPTIONS = {"csv": {"header": True, "inferSchema": True}}
_SUFFIXES = {".csv": "csv", ".orc": "orc", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
#: Records of Spark's log about a task that failed, whose error the command shows in one line.
_FAILED_TASK = re.compile(
    rb"\S+ \S+ ERROR (?:Executor: Exception in task|TaskSetManager: Task \d+ in stage \S+ failed)"
)
_RECORD = re.compile(rb"\S+ \S+ (?:ERROR|WARN) ")
#: The lines of a record behind its first one: a stack of Java, a traceback of Python, the texts of errors.
_MORE = re.compile(
    rb"\s|$|Caused by: |Traceback \(most recent|During handling of|The above exception"
    rb"|If (?:not|it is), |[\w.]+(?:Error|Exception)\b"
)
_END = b"distkeras: end of the console\n"
#: Seconds that the last lines have to get through.
_FLUSH_SECONDS = 2.0


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `run_command` reads."""
    more = parser.add_argument_group("more")
    more.add_argument("--import", nargs="+", metavar="MODULE", help="modules that register custom Keras objects")
    more.add_argument("--debug", **SWITCH, help="the whole traceback of an error, not one line")


def run_command(
    prog: str,
    parser: Callable[[], TomlArgumentParser],
    run: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None,
) -> int:
    """Run a command, and return its exit status: 0; 2 for an error that has a name; 130 after Ctrl-C."""
    from pyspark.errors import PySparkException

    debug = False
    try:
        arguments = parser().parse_with_file(sys.argv[1:] if argv is None else argv)
        debug = bool(arguments.debug)
        if debug:
            os.environ[VARIABLE] = "full"
            chatter.end()
        with contextlib.nullcontext() if debug or chatter.wanted() else _quiet():
            # The name tells these lines from those of Spark. Libraries that log at INFO are not asked to.
            logging.basicConfig(format="%(asctime)s distkeras %(levelname)s %(message)s", datefmt="%H:%M:%S")
            logging.getLogger("distkeras").setLevel(logging.INFO)
            for module in getattr(arguments, "import") or ():
                importlib.import_module(module)
            run(arguments)
    except (DistkerasError, ImportError, OSError, PySparkException) as error:
        if debug:
            raise
        sys.stderr.write(f"{prog}: {type(error).__name__}: {headline(str(error))}\n")
        return 2
    except KeyboardInterrupt as error:
        sys.stderr.write(f"{prog}: interrupted. {error}\n")
        return 130
    return 0


def add_data_flags(files: Any, text: str) -> None:
    """Add ``--data`` and ``--format``, which `read` needs."""
    files.add_argument("--data", required=True, help=f"{text}; the name of a table with --format table")
    files.add_argument("--format", choices=FORMATS, help="format of --data (default: by its suffix, else parquet)")


def format_of(arguments: argparse.Namespace) -> str:
    """Return the format of ``--data``."""
    suffixes = [suffix.lower() for suffix in PurePath(arguments.data.rstrip("/")).suffixes]
    if suffixes and suffixes[-1] in (".gz", ".bz2", ".zst"):
        suffixes.pop()
    return arguments.format or _SUFFIXES.get(suffixes[-1] if suffixes else "", "parquet")


def read(spark: SparkSession, arguments: argparse.Namespace) -> DataFrame:
    """Return the rows of ``--data``; raise ConfigurationError for data that Spark cannot read."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    kind = format_of(arguments)
    context = spark.sparkContext
    context.setLogLevel("OFF")  # Spark logs the stack of what the error says in one line
    try:
        if kind == "table":
            return spark.read.table(arguments.data)
        return spark.read.format(kind).options(**OPTIONS.get(kind, {})).load(arguments.data)
    except (PySparkException, Py4JError) as error:
        what = "a table that Spark knows" if kind == "table" else f"{kind} that Spark can read"
        raise ConfigurationError(
            f"`--data` must be {what}. Received: --data {arguments.data}: {innermost(error)}"
        ) from error
    finally:
        context.setLogLevel(spark.conf.get("spark.log.level", None) or "WARN")


def load_model(uri: str) -> keras.Model:
    """Return the model in a ``.keras`` file, compiled as it was; raise ConfigurationError if Keras cannot load it."""
    import pyarrow as pa

    try:
        system, path = file_system(uri)
        with system.open_input_stream(path) as file:
            return archive.from_bytes(file.read(), compiled=True)
    except (OSError, pa.ArrowException, ConfigurationError) as error:
        raise ConfigurationError(
            f"`--model` must be a model that Keras saved. Received: --model {uri}: {error}"
        ) from error


@contextlib.contextmanager
def spark_session() -> Iterator[SparkSession]:
    """Give the session of a command: that of spark-submit, or a new one. It ends with the context."""
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # run as a plain script, not by spark-submit
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder
    if VARIABLE not in os.environ and not chatter.wanted():
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        if not SparkConf().contains("spark.log.level"):
            builder = builder.config("spark.log.level", "WARN")
    spark = builder.getOrCreate()
    try:
        chatter.quiet_session(spark)
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out of the standard error, also of child processes, what `chatter` knows, and the stacks of Spark's log."""
    sys.stderr.flush()
    saved, stderr = os.dup(2), sys.stderr
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    ended = threading.Event()
    reader = threading.Thread(target=_forward, args=(reading, saved, ended), name="distkeras-console", daemon=True)
    reader.start()
    # Python's own lines go straight to the terminal, where a progress bar may be.
    sys.stderr = os.fdopen(os.dup(saved), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    try:
        yield
    finally:
        sys.stderr, mine = stderr, sys.stderr
        mine.flush()
        os.write(2, _END)
        os.dup2(saved, 2)
        ended.wait(_FLUSH_SECONDS)


def _forward(source: int, target: int, ended: threading.Event) -> None:
    with os.fdopen(source, "rb", buffering=0) as pipe:
        rest, in_record = b"", False
        while piece := pipe.read(1 << 16):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line + b"\n" == _END:
                    ended.set()
                    continue
                begins = _RECORD.match(line) is not None
                if in_record and not begins and _MORE.match(line):
                    continue
                in_record = begins
                if not chatter.LINES.match(line) and not _FAILED_TASK.match(line):
                    os.write(target, line + b"\n")
    os.close(target)
