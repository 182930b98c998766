"""Predicts with a Keras model for the rows of Parquet files, as a batch or as a stream.

Leaves in OUT: the rows of DATA as Parquet, with the new columns that `KerasModel` adds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkeras import KerasEstimator, KerasModel
from distkeras.flags import SWITCH, TomlArgumentParser, columns_of
from distkeras.keras_model import archive
from distkeras.ml.params import KEYWORDS
from distkeras.options import texts_of_arguments
from distkeras.ps.errors import VARIABLE, ConfigurationError, DistkerasError, headline

if TYPE_CHECKING:
    from pyspark.ml import Transformer
    from pyspark.sql import DataFrame, SparkSession

EXAMPLE = """\
example, with `spark-submit scripts/score.py` in place of `distkeras score` on a cluster:
  distkeras score --data rows.parquet --model model.keras --out scored --prediction class

what has come since the last call, each row once:
  distkeras score --data arriving --model model.keras --out scored --stream --checkpoint progress

the same as a file, for --config score.toml; flags win over the file:
  data = "arriving"
  model = "model.keras"
  out = "scored"
  stream = true
  checkpoint = "progress"
"""
#: Keyword of `KerasModel` to flag, where the flag is shorter.
RENAMED = {
    "features_col": "features",
    "prediction_col": "prediction",
    "probability_col": "probability",
    "raw_prediction_col": "raw_prediction",
    "prediction_batch_size": "batch_size",
    "prediction_batch_bytes": "batch_bytes",
}
#: Keywords that are no flags: they serve evaluation, or hold no text.
LEFT_OUT = {"label_col", "sample_weight_col", "decode", "custom_objects"}


def keywords() -> dict[str, str]:
    """The keywords of `KerasModel` that are flags, with the flag's name in underscores."""
    names = [KEYWORDS.get(param.name, param.name) for param in KerasModel().params]
    return {name: RENAMED.get(name, name) for name in names if name not in LEFT_OUT}


def parser() -> TomlArgumentParser:
    """All options."""
    main = TomlArgumentParser(
        prog="distkeras score",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    files = main.add_argument_group("files (any place that Spark reads and writes)")
    files.add_argument(
        "--data", required=True, help="Parquet to predict for; with --stream, the folder that it comes to"
    )
    model = (
        "model as Keras saves it (.keras; a path, or a URI that Arrow's file systems know), or a folder with a saved "
    )
    files.add_argument("--model", required=True, help=model + "`KerasModel` or `PipelineModel`")
    files.add_argument("--out", required=True, help="folder to write to")
    files.add_argument("--overwrite", **SWITCH, help="write over what an earlier run has left in --out")
    stream = main.add_argument_group("stream")
    stream.add_argument("--stream", **SWITCH, help="predict for the files that have come since the last call, and end")
    every = "do not end: look for new files every so many seconds"
    stream.add_argument("--every", type=float, metavar="X", help=every)
    where = "folder that keeps how far the stream has come, of this stream alone"
    stream.add_argument("--checkpoint", metavar="URI", help=where)
    columns = main.add_argument_group("columns and batches (of a .keras file, or of a saved `KerasModel`)")
    texts, blank = texts_of_arguments(KerasEstimator), KerasModel()
    for keyword, flag in keywords().items():
        several = {"nargs": "+"} if keyword in ("features_col", "prediction_col") else {}
        param = blank.getParam(keyword)
        number = blank.hasDefault(param) and isinstance(blank.getOrDefault(param), int)
        kind: dict[str, Any] = {"type": int, "metavar": "N"} if number else {"metavar": "NAME", **several}
        columns.add_argument(f"--{flag.replace('_', '-')}", **kind, help=texts[keyword].replace("%", "%%"))
    more = main.add_argument_group("more")
    more.add_argument("--import", nargs="+", metavar="MODULE", help="modules that register custom Keras objects")
    more.add_argument("--debug", **SWITCH, help="the whole traceback of an error, not one line")
    return main


def given_keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `KerasModel` that were given."""
    given = {keyword: getattr(arguments, flag) for keyword, flag in keywords().items()}
    given = {keyword: value for keyword, value in given.items() if value is not None}
    given = {keyword: columns_of(value) if isinstance(value, list) else value for keyword, value in given.items()}
    return {
        keyword: value[0] if isinstance(value, list) and len(value) == 1 else value for keyword, value in given.items()
    }


def model_of(arguments: argparse.Namespace) -> Transformer:
    """What predicts.

    Raises:
        ConfigurationError: no model is there, or the options are not for it.
    """
    from pyspark.ml import PipelineModel
    from pyspark.ml.util import DefaultParamsReader
    from pyspark.sql import SparkSession

    uri, given = arguments.model, given_keywords(arguments)
    if uri.endswith(".keras"):
        return KerasModel(archive.from_bytes(bytes_of(uri), compiled=True), **given)
    kind = DefaultParamsReader.loadMetadata(uri, SparkSession.active())["class"].rpartition(".")[2]
    if kind == KerasModel.__name__:
        loaded: Transformer = KerasModel.load(uri).setParams(**given)
        return loaded
    if given:
        flags = [f"--{keywords()[keyword].replace('_', '-')}" for keyword in given]
        raise ConfigurationError(f"{', '.join(flags)} must be of a Keras model. Received: --model {uri}, a {kind}")
    return PipelineModel.load(uri)


def bytes_of(uri: str) -> bytes:
    """A file, here or where Arrow's file systems know.

    Raises:
        ConfigurationError: it cannot be read.
    """
    import pyarrow as pa
    from pyarrow import fs

    try:
        system, path = fs.FileSystem.from_uri(uri if "://" in uri else Path(uri).absolute().as_uri())
        with system.open_input_stream(path) as file:
            data: bytes = file.read()
    except (OSError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"`--model` must be a model that Keras saved. Received: --model {uri}: {error}"
        ) from error
    return data


def require_options(arguments: argparse.Namespace) -> None:
    """Raise an error unless the options go together.

    Raises:
        ConfigurationError: they do not.
    """
    if arguments.stream and arguments.checkpoint is None:
        raise ConfigurationError("`--stream` needs `--checkpoint`. Received: none")
    if arguments.stream and arguments.overwrite:
        raise ConfigurationError("`--overwrite` must not be given for a stream, whose rows come once")
    if not arguments.stream and (arguments.checkpoint is not None or arguments.every is not None):
        raise ConfigurationError("`--checkpoint` and `--every` need `--stream`. Received: none")


def write(spark: SparkSession, model: Transformer, arguments: argparse.Namespace) -> None:
    """Predicts, and writes."""
    rows: DataFrame = spark.read.parquet(arguments.data)
    if not arguments.stream:
        mode = "overwrite" if arguments.overwrite else "error"
        model.transform(rows).write.mode(mode).parquet(arguments.out)
        return
    arriving = spark.readStream.schema(rows.schema).parquet(arguments.data)
    writer = model.transform(arriving).writeStream.format("parquet").option("checkpointLocation", arguments.checkpoint)
    every = arguments.every
    writer = writer.trigger(availableNow=True) if every is None else writer.trigger(processingTime=f"{every} seconds")
    writer.start(arguments.out).awaitTermination()


def run(arguments: argparse.Namespace) -> None:
    """The job."""
    from pyspark.sql import SparkSession

    require_options(arguments)
    for module in getattr(arguments, "import") or ():
        importlib.import_module(module)
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # run as a plain script, not by spark-submit
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.getOrCreate()
    try:
        write(spark, model_of(arguments), arguments)
    finally:
        spark.stop()
    sys.stdout.write(f"Predictions are in {arguments.out}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for an error that has a name."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from pyspark.errors import PySparkException

    debug = False
    try:
        arguments = parser().parse_with_file(sys.argv[1:] if argv is None else argv)
        debug = bool(arguments.debug)
        if debug:
            os.environ[VARIABLE] = "full"
        run(arguments)
    except (DistkerasError, ImportError, OSError, PySparkException) as error:
        if debug:
            raise
        sys.stderr.write(f"distkeras score: {type(error).__name__}: {headline(str(error))}\n")
        return 2
    return 0
