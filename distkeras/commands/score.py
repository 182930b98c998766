"""Predicts with a Keras model for rows that Spark reads, as a batch or as a stream.

Leaves in OUT: the rows of DATA as Parquet, with the new columns that `KerasModel` adds.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distkeras import KerasModel
from distkeras.commands.console import (
    OPTIONS,
    add_common_flags,
    add_data_flags,
    format_of,
    load_model,
    read,
    run_command,
    spark_session,
)
from distkeras.data.padding import padding_from_json
from distkeras.flags import PAIRS, SWITCH, TomlArgumentParser, columns_of, values_of
from distkeras.ml.params import KEYWORDS, OUTPUT_KINDS
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.ml import Transformer
    from pyspark.sql import DataFrame, SparkSession

#: The options of the short help.
FIRST = ("data", "format", "model", "out", "overwrite", "stream", "checkpoint", "features", "prediction")
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
#: How argparse reads a keyword that is no single name or number.
_KINDS: dict[str, dict[str, Any]] = {
    "features_col": {"nargs": "+"},
    "prediction_col": {"nargs": "+"},
    "thresholds": {"nargs": "+", "type": float, "metavar": "X"},
    "handle_invalid": {"choices": ("error", "skip", "keep"), "metavar": None},
    "output_type": {"choices": ("array", "vector"), "metavar": None},
    "padding": PAIRS,
    "output_kind": {"choices": OUTPUT_KINDS, "metavar": None},
}
#: Keywords that are no flags: they serve evaluation, or hold no text.
LEFT_OUT = {"label_col", "sample_weight_col", "decode", "custom_objects"}


def keywords() -> dict[str, str]:
    """Return the keywords of `KerasModel` that are flags, with the flag's name in underscores."""
    names = [KEYWORDS.get(param.name, param.name) for param in KerasModel().params]
    return {name: RENAMED.get(name, name) for name in names if name not in LEFT_OUT}


def parser() -> TomlArgumentParser:
    """Return the parser of all options."""
    main = TomlArgumentParser(
        prog="distkeras score",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        first=FIRST,
        example=EXAMPLE.partition("\n\n")[0],
    )
    files = main.add_argument_group("files (any place that Spark reads and writes)")
    add_data_flags(files, "rows to predict for; with --stream, the folder in which files arrive")
    model = (
        "model as Keras saves it (.keras; a path, or a URI that Arrow's file systems know), or a folder with a saved "
    )
    files.add_argument("--model", required=True, help=model + "`KerasModel` or `PipelineModel`")
    files.add_argument("--out", required=True, help="folder to write to")
    files.add_argument("--overwrite", **SWITCH, help="overwrite the results of an earlier run in --out")
    stream = main.add_argument_group("stream")
    stream.add_argument("--stream", **SWITCH, help="predict for files that have arrived since the last call")
    every = "do not end: look for new files every X seconds"
    stream.add_argument("--every", type=float, metavar="X", help=every)
    where = "folder for the progress of this stream only"
    stream.add_argument("--checkpoint", metavar="URI", help=where)
    columns = main.add_argument_group("columns and batches (of a .keras file, or of a saved `KerasModel`)")
    blank = KerasModel()
    for keyword, flag in keywords().items():
        param = blank.getParam(keyword)
        default = blank.getOrDefault(param) if blank.hasDefault(param) else None
        kind: dict[str, Any] = {"type": int} if isinstance(default, int) else {}
        text = param.doc if default in (None, "") else f"{param.doc} (default: {default})"
        kind |= {"metavar": "N" if kind else "NAME"} | _KINDS.get(keyword, {})
        columns.add_argument(f"--{flag.replace('_', '-')}", **kind, help=text.replace("%", "%%"))
    add_common_flags(main)
    return main


def given_keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of `KerasModel` that were given."""
    present = {keyword: getattr(arguments, flag) for keyword, flag in keywords().items()}
    present = {keyword: value for keyword, value in present.items() if value is not None}
    present = {
        keyword: columns_of(value) if keyword in ("features_col", "prediction_col") else value
        for keyword, value in present.items()
    }
    if not present["padding"]:
        del present["padding"]
    else:
        present["padding"] = padding_from_json(values_of(present["padding"]))
    return {
        keyword: value[0] if isinstance(value, list) and len(value) == 1 else value
        for keyword, value in present.items()
    }


def model_of(arguments: argparse.Namespace) -> Transformer:
    """Return the transformer that predicts; raise ConfigurationError for no model, or options not for it."""
    from pyspark.ml import PipelineModel
    from pyspark.ml.util import DefaultParamsReader
    from pyspark.sql import SparkSession

    uri, predictor_options = arguments.model, given_keywords(arguments)
    if uri.endswith(".keras"):
        with warnings.catch_warnings():
            # Scoring needs no optimizer. That of a model that has been trained by others' optimizers has no state.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            return KerasModel(load_model(uri), **predictor_options)
    kind = DefaultParamsReader.loadMetadata(uri, SparkSession.active())["class"].rpartition(".")[2]
    if kind == KerasModel.__name__:
        loaded: Transformer = KerasModel.load(uri).setParams(**predictor_options)
        return loaded
    if predictor_options:
        flags = [f"--{keywords()[keyword].replace('_', '-')}" for keyword in predictor_options]
        raise ConfigurationError(
            f"{', '.join(flags)} must only be given with a Keras model. Received: --model {uri}, a {kind}"
        )
    return PipelineModel.load(uri)


def require_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigurationError unless the options go together."""
    if arguments.stream and arguments.checkpoint is None:
        raise ConfigurationError("`--stream` needs `--checkpoint`. Received: none")
    if arguments.stream and arguments.overwrite:
        raise ConfigurationError("`--overwrite` must not be given with `--stream`, which adds to --out. Received: both")
    if not arguments.stream and (arguments.checkpoint is not None or arguments.every is not None):
        raise ConfigurationError("`--checkpoint` and `--every` need `--stream`. Received: none")


def write(spark: SparkSession, model: Transformer, arguments: argparse.Namespace) -> None:
    """Predict, and write the rows."""
    rows = read(spark, arguments)
    if not arguments.stream:
        mode = "overwrite" if arguments.overwrite else "error"
        model.transform(rows).write.mode(mode).parquet(arguments.out)
        return
    arriving = _arriving(spark, rows, arguments)
    writer = model.transform(arriving).writeStream.format("parquet").option("checkpointLocation", arguments.checkpoint)
    every = arguments.every
    writer = writer.trigger(availableNow=True) if every is None else writer.trigger(processingTime=f"{every} seconds")
    writer.start(arguments.out).awaitTermination()


def _arriving(spark: SparkSession, rows: DataFrame, arguments: argparse.Namespace) -> DataFrame:
    kind = format_of(arguments)
    if kind == "table":
        return spark.readStream.table(arguments.data)
    reader = spark.readStream.schema(rows.schema).format(kind).options(**OPTIONS.get(kind, {}))
    return reader.load(arguments.data)


def run(arguments: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    require_options(arguments)
    with spark_session() as spark:
        try:
            write(spark, model_of(arguments), arguments)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_stop_message(arguments)) from None
    sys.stdout.write(f"Predictions are in {arguments.out}\n")


def _stop_message(arguments: argparse.Namespace) -> str:
    if arguments.stream:
        return f"The same command continues after the last batch of rows that {arguments.checkpoint} has."
    return f"{arguments.out} may be incomplete: the same command with --overwrite begins again."


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0; 2 for an error that has a name; 130 after Ctrl-C."""
    return run_command("distkeras score", parser, run, argv)
