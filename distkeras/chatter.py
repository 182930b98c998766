"""What TensorFlow, Spark and the JVM print at every start: off, unless ``DISTKERAS_VERBOSE=1`` is in the environment.

`begin` runs with the first import of the package, in drivers and in tasks. It only fills in what the user has not set:
``TF_CPP_MIN_LOG_LEVEL``, and a configuration of Spark's log for a JVM that this process will start. A line is left out
because its text is known and says nothing about the user's program; everything else is printed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: If this variable is set to anything but "0", nothing is left out.
VARIABLE = "DISTKERAS_VERBOSE"
LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_OPTIONS = "SPARK_SUBMIT_OPTS"

#: What TensorFlow and the JVM print before any setting of theirs counts, and Spark before its log is set up.
LINES = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog|[IE]0000 .*(?i:cuda|onednn|cpu_feature_guard|tensorrt)"
    rb"|To enable the following instructions:|WARNING: Using incubator modules|Using Spark's default log4j profile"
    rb"|NOTE: Picked up |Picked up (JAVA_TOOL_OPTIONS|_JAVA_OPTIONS)|Setting default log level to"
    rb"|To adjust logging level use|SLF4J"
    rb"|\S+ \S+ WARN (NativeCodeLoader|TaskSetManager: Stage \d+ contains a task of very large size"
    rb"|Utils: (Your hostname|Set SPARK_LOCAL_IP|Service 'SparkUI'))"
)
#: Spark's own configuration of the log in a shell, without the messages that its last lines name.
_SPARKS_LOG = Path(__file__).with_name("log4j2.properties")
_MESSAGES = re.compile(r"^appender\.console\.filter\.known\.regex = (.*)$", re.M)

#: What this module has put into the environment.
_filled: dict[str, str] = {}
#: The applications of Spark whose log leaves out the messages.
_applications: set[str] = set()


def wanted() -> bool:
    """Return whether the user asks for every line."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def begin() -> None:
    """Leave out what the first imports and the first session of this process would print."""
    if wanted():
        return
    if "tensorflow" not in sys.modules and os.environ.get(LEVEL) != "0":
        # Without an NVIDIA GPU, the one line of level 2 is about its absence.
        _fill(LEVEL, "2" if os.path.exists("/dev/nvidiactl") else "3")  # noqa: PTH110 - pathlib is slower to import
        sys.meta_path.insert(0, _QuietTensorFlow())
    # Keras' loops are one function for TensorFlow, so that it warns of each program that calls several models.
    logging.getLogger("tensorflow").addFilter(lambda record: "<function TensorFlowTrainer." not in record.getMessage())
    if "PYSPARK_GATEWAY_PORT" not in os.environ and _SPARKS_LOG.is_file() and not _has_log_settings():
        options = f"-Dlog4j2.configurationFile={_SPARKS_LOG}"
        if not _on_terminal():  # Spark's bar is of no use in a file or a notebook
            options += " -Dspark.ui.showConsoleProgress=false"
        _fill(_OPTIONS, options)


def end() -> None:
    """Take back what `begin` has put into the environment, for child processes that are not of this program."""
    for name, value in _filled.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _filled.clear()


def is_users(name: str) -> bool:
    """Return whether a variable is in the environment, and not by `begin`."""
    return name in os.environ and os.environ[name] != _filled.get(name)


def _fill(name: str, value: str) -> None:
    if name not in os.environ:
        os.environ[name] = _filled[name] = value


def _on_terminal() -> bool:
    try:
        return os.isatty(2)
    except OSError:  # there is no standard error
        return False


def _has_log_settings() -> bool:
    """Return whether Spark's folder of settings has some for the log."""
    spark = importlib.util.find_spec("pyspark")
    homes = [os.environ.get("SPARK_HOME"), *(spark.submodule_search_locations or () if spark else ())]
    folders = [os.environ.get("SPARK_CONF_DIR"), *(f"{home}/conf" for home in homes if home)]
    return any(True for folder in folders if folder for _ in Path(folder).glob("log4j2.*[!e]"))


def quiet_session(session: SparkSession) -> None:
    """Leave the known messages out of the log of a session that runs."""
    context = None if wanted() else vars(session).get("_sc")  # none under Spark Connect, whose log is the server's
    if context is None or context.applicationId in _applications:
        return
    from py4j.protocol import Py4JError

    _applications.add(context.applicationId)
    found = _MESSAGES.search(_SPARKS_LOG.read_text(encoding="utf-8")) if _SPARKS_LOG.is_file() else None
    log4j: Any = context._jvm.org.apache.logging.log4j  # noqa: SLF001 - PySpark has no public way to the JVM
    if found is None:
        return
    with contextlib.suppress(Py4JError, TypeError, AttributeError):  # another logging library: its messages stay
        deny, neutral = (log4j.core.Filter.Result.valueOf(name) for name in ("DENY", "NEUTRAL"))
        known = log4j.core.filter.RegexFilter.createFilter(found[1].replace("\\\\", "\\"), None, False, deny, neutral)
        logging = log4j.LogManager.getContext(False)
        logging.getConfiguration().addFilter(known)
        logging.updateLoggers()


@contextlib.contextmanager
def without_lines() -> Iterator[None]:
    """Leave the known lines out of the standard error of this process, where C++ writes them; the others come late."""
    try:
        saved = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            _print_others(kept)


def _print_others(kept: IO[bytes]) -> None:
    kept.seek(0)
    text = b"".join(line for line in kept if not LINES.match(line))
    while text:
        text = text[os.write(2, text) :]


class _QuietTensorFlow(MetaPathFinder):
    """Wraps the first import of TensorFlow: its libraries print lines before they read any setting."""

    def __init__(self) -> None:
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of another finder, whose loader runs quietly; None for other modules."""
        if fullname != "tensorflow" or getattr(self._searching, "active", False):
            return None  # another finder, such as that of a coverage tool, may ask all others as this one does
        self._searching.active = True
        try:
            others = (finder for finder in sys.meta_path if finder is not self)
            spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        finally:
            self._searching.active = False
        if spec is not None and spec.loader is not None:
            spec.loader = _QuietLoader(spec.loader, self)
        return spec


class _QuietLoader(Loader):
    def __init__(self, loader: Loader, finder: _QuietTensorFlow) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # whom readers of the module's source ask
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        with without_lines():
            self._loader.exec_module(module)
