"""Trains a Keras model on Parquet under any update rule; for spark-submit.

Leaves in OUT: model.keras, history.parquet (a row a mini-batch), commits.parquet (a row a commit), summary.json, and,
where matplotlib is installed, plots of each metric against time and of the staleness.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkeras.ps.errors import ConfigurationError, DistkerasError
from distkeras.ps.protocol.compression import FORMATS
from distkeras.ps.rules import all_rules, from_text, json_or_text, make

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

    from distkeras.trainer import Trainer

#: What `--rule` takes beside the rules: the trainers that are none.
SINGLE, ENSEMBLE = "single", "ensemble"

#: Flag to keyword of `Trainer`, where they differ; all other flags of the group "training" are keywords themselves.
KEYWORDS = {
    "features": "features_col",
    "label": "label_col",
    "sample_weight": "sample_weight_col",
    "workers": "num_workers",
    "epochs": "num_epoch",
    "server_learning_rate": "learning_rate",
}

TRAINING = "training"

EXAMPLE = """\
example:
  spark-submit --master 'local[2,4]' scripts/train.py --data train.parquet --model model.keras --out out \\
      --rule agn --set window=4 --workers 2 --batch-size 128 --epochs 2 --optimizer adam \\
      --optimizer-set learning_rate=0.001 --loss sparse_categorical_crossentropy --metrics accuracy

the same as a file, for --config job.toml; flags win over the file, name by name in the tables:
  data = "train.parquet"
  model = "model.keras"
  out = "out"
  rule = "agn"
  set = {window = 4}
  workers = 2
  batch_size = 128
  epochs = 2
  optimizer = "adam"
  optimizer_set = {learning_rate = 0.001}
  loss = "sparse_categorical_crossentropy"
  metrics = ["accuracy"]
"""


def parser() -> argparse.ArgumentParser:
    """All options. A key of a TOML file is a flag's name with underscores, and its value passes through here too."""
    main = argparse.ArgumentParser(
        prog="train.py",
        description=__doc__,
        epilog=f"{EXAMPLE}\n{_rules_text()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    main.add_argument("--config", metavar="FILE", help="TOML file with the options below as keys")
    files = main.add_argument_group("files (paths, or URIs that Arrow's file systems know)")
    files.add_argument("--data", required=True, help="Parquet to train on: whatever Spark reads")
    files.add_argument("--model", required=True, help="built model, as Keras saves it (.keras)")
    files.add_argument("--out", required=True, help="folder to write to; new or empty")
    _switch(files, "--overwrite", "write over what an earlier run has left in --out")
    _switch(files, "--plots", "draw plots (default: where matplotlib is installed)")
    rule = main.add_argument_group("rule")
    rule.add_argument(
        "--rule",
        required=True,
        help=f"a rule below; '{SINGLE}' for sequential training on one executor; '{ENSEMBLE}' for --workers "
        "independent models, each trained on its own part of the rows and written to OUT/0, OUT/1 and so on",
    )
    _pairs(rule, "--set", "hyper-parameters of the rule")
    training = main.add_argument_group(TRAINING)
    training.add_argument("--features", nargs="+", metavar="COLUMN", help="one for each input (default: features)")
    training.add_argument("--label", nargs="+", metavar="COLUMN", help="one for each output (default: label)")
    training.add_argument("--sample-weight", metavar="COLUMN", help="weight of each row")
    _pairs(training, "--class-weight", "weight of each class", name="CLASS")
    training.add_argument("--workers", type=int, help="number of workers (default: Spark's default parallelism)")
    training.add_argument("--batch-size", type=int, help="rows of one mini-batch of one worker (default: 32)")
    training.add_argument("--epochs", type=int, help="passes over the data (default: 1)")
    training.add_argument("--optimizer", help="Keras' name of the workers' optimizer (default: the model's, or sgd)")
    _pairs(training, "--optimizer-set", "arguments of the optimizer")
    training.add_argument("--loss", help="Keras' name of it (default: the one that the model is compiled with)")
    training.add_argument("--loss-weights", nargs="+", type=float, metavar="WEIGHT", help="one for each output")
    training.add_argument("--metrics", nargs="+", metavar="NAME", help="Keras' names (default: the model's)")
    training.add_argument("--weighted-metrics", nargs="+", metavar="NAME", help="those that sample weights apply to")
    training.add_argument(
        "--server-learning-rate", type=float, help="of rules that step at the server (default: the optimizer's)"
    )
    training.add_argument("--staleness-bound", type=int, help="iterations a worker may be ahead of the slowest")
    training.add_argument("--seed", type=int, help="of the row order (default: 0)")
    _switch(training, "--shuffle", "a new row order for each epoch (default: on)")
    _switch(training, "--partitioned-already", "the data has --workers partitions in a reproducible order")
    _switch(training, "--measure-gap", "fill the column gap of the commits")
    training.add_argument("--wire-format", choices=FORMATS, help="of what workers and server send (default: float32)")
    _switch(training, "--overlap", "compute while commits travel")
    window = 'steps between two exchanges, instead of the rule\'s; "auto" measures and chooses'
    training.add_argument("--communication-window", type=json_or_text, metavar="STEPS", help=window)
    training.add_argument("--communication-share", type=float, help="of the time, for communication, with auto")
    training.add_argument("--spool-bytes", type=int, help="memory of a worker for later epochs, before a file")
    training.add_argument("--threads", type=int, help="compute threads of a worker (default: the cores of a task)")
    training.add_argument("--host", help="address of the driver that executors reach (default: Spark's driver host)")
    training.add_argument("--port", type=int, help="of the parameter server (default: one that is free)")
    _switch(training, "--tls", "encrypt what workers and server tell each other")
    training.add_argument("--bad-numbers", choices=["raise", "skip"], help="what a NaN does (default: raise)")
    training.add_argument("--max-skipped", type=int, help="commits that may be skipped for a NaN (default: 100)")
    training.add_argument("--stall-after", type=float, help="seconds of silence that are told (default: 300)")
    _switch(training, "--progress", "show a progress bar (default: on a terminal)")
    saving = main.add_argument_group("when something dies")
    saving.add_argument("--checkpoint", metavar="URI", help="folder for snapshots of the server, of this job alone")
    saving.add_argument("--checkpoint-every", type=int, metavar="COMMITS", help="from one to the next (default: 100)")
    _switch(saving, "--resume", "go on with the job that --checkpoint holds, if there is one")
    more = main.add_argument_group("more")
    more.add_argument(
        "--import", dest="import", nargs="+", metavar="MODULE", help="modules that register custom Keras objects"
    )
    _switch(more, "--debug", "the whole traceback of an error, not one line")
    return main


def _switch(group: Any, flag: str, help: str) -> None:
    group.add_argument(flag, action=argparse.BooleanOptionalAction, help=help)


def _pairs(group: Any, flag: str, help: str, name: str = "NAME") -> None:
    group.add_argument(flag, nargs="+", action="extend", type=_pair, default=[], metavar=f"{name}=VALUE", help=help)


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE. Received: {text!r}")
    return name, value


def _rules_text() -> str:
    lines = ["rules, with what --set takes and the defaults:"]
    for name, rule in all_rules().items():
        options = " ".join(f"{field.name}={json.dumps(field.default)}" for field in dataclasses.fields(rule))
        lines.append(f"  {name:<16} {options}")
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options from the command line and, before it, the file that it names.

    Raises:
        ConfigurationError: the file cannot be read, or has a key that is no option.
        SystemExit: from argparse, with its message and status 2.
    """
    known = parser()
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    config = first.parse_known_args(argv)[0].config
    return known.parse_args([*(_arguments_of(config, known) if config else ()), *argv])


def _arguments_of(path: str, known: argparse.ArgumentParser) -> Iterator[str]:
    """A TOML file as the command line that says the same."""
    actions = {action.dest: action for action in known._actions if action.dest not in ("help", "config")}
    for key, value in _toml(path).items():
        action = actions.get(key)
        if action is None:
            raise ConfigurationError(f"{path} may have the keys {', '.join(actions)}. Received: {key}")
        flag = action.option_strings[0]
        if action.type is _pair:
            if not isinstance(value, Mapping):
                raise ConfigurationError(f"`{key}` in {path} must be a table. Received: {key}={value!r}")
            texts = [f"{name}={json.dumps(part, default=str)}" for name, part in value.items()]
            yield from [flag, *texts] if texts else []
        elif isinstance(action, argparse.BooleanOptionalAction):
            if not isinstance(value, bool):
                raise ConfigurationError(f"`{key}` in {path} must be true or false. Received: {key}={value!r}")
            yield flag if value else action.option_strings[1]
        elif action.nargs == "+":
            yield from [flag, *map(str, value if isinstance(value, list) else [value])]
        else:
            yield f"{flag}={value}"


def _toml(path: str) -> dict[str, Any]:
    if importlib.util.find_spec("tomllib") is None:
        raise ConfigurationError(
            f"`--config` needs Python 3.11 or newer. Received: --config {path} on Python {sys.version.split()[0]}"
        )
    import tomllib

    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"`--config` must be a TOML file. Received: --config {path}: {error}") from error


def values_of(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """NAME=VALUE pairs as a mapping; the last of a name counts. Values are JSON where they can be, else text."""
    return {name: json_or_text(text) for name, text in pairs}


def training_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `Trainer` that were given.

    Raises:
        ConfigurationError: a class that is no number, or an optimizer that Keras cannot make.
    """
    group = next(group for group in parser()._action_groups if group.title == TRAINING)
    given = {action.dest: getattr(arguments, action.dest) for action in group._group_actions}
    optimizer, options = given.pop("optimizer"), values_of(given.pop("optimizer_set"))
    keywords = {KEYWORDS.get(name, name): value for name, value in given.items() if value is not None and value != []}
    if "class_weight" in keywords:
        weights = values_of(keywords["class_weight"])
        try:
            keywords["class_weight"] = {int(name): float(weight) for name, weight in weights.items()}
        except (TypeError, ValueError):
            raise ConfigurationError(f"`--class-weight` must be CLASS=WEIGHT. Received: {weights}") from None
    if optimizer is None and options:
        raise ConfigurationError(f"`--optimizer-set` needs `--optimizer`. Received: {options} for none")
    if optimizer is not None:
        keywords["worker_optimizer"] = _optimizer(optimizer, options)
    return keywords


def _optimizer(name: str, options: Mapping[str, Any]) -> Any:
    import keras

    try:
        return keras.optimizers.get({"class_name": name, "config": dict(options)})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"`--optimizer` and `--optimizer-set` must be what Keras knows. Received: {name} with {options}; "
            f"Keras said: {error}"
        ) from error


def saving_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `Trainer.train` that were given.

    Raises:
        ConfigurationError: they go with another option that was not given, or not with the rule.
    """
    from distkeras.ps.checkpoint.checkpointer import Checkpoint

    uri, every, resume = arguments.checkpoint, arguments.checkpoint_every, bool(arguments.resume)
    if uri is None and (resume or every is not None):
        raise ConfigurationError("`--resume` and `--checkpoint-every` need `--checkpoint`. Received: none")
    if uri is None:
        return {}
    if arguments.rule.lower() == ENSEMBLE:
        raise ConfigurationError(f"`--checkpoint` must be of one job. Received: --rule {ENSEMBLE}")
    return {"checkpoint": Checkpoint(uri) if every is None else Checkpoint(uri, every), "resume": resume}


def trainer_of(arguments: argparse.Namespace, model: keras.Model) -> Any:
    """The `Trainer`, or the `EnsembleTrainer`, that the options ask for.

    Raises:
        ConfigurationError: options that cannot work.
    """
    from distkeras.trainer import Trainer
    from distkeras.trainers import EnsembleTrainer

    keywords = training_of(arguments)
    name = arguments.rule.lower()
    rule = {SINGLE: "downpour", ENSEMBLE: "downpour"}.get(name, name)
    options = from_text(rule, arguments.set)
    if name in (SINGLE, ENSEMBLE):
        options = {"window": 10, **options}  # only how often it reports: no other worker commits between
    made = make(rule, **options)
    if name == ENSEMBLE:
        count = keywords.pop("num_workers", 2)
        metrics = keywords.pop("metrics", None)
        return EnsembleTrainer(
            model, metrics=metrics, num_ensembles=count, communication_window=made.window, **keywords
        )
    if name == SINGLE and keywords.setdefault("num_workers", 1) != 1:
        raise ConfigurationError(f"`--workers` must be 1 for --rule {SINGLE}. Received: {keywords['num_workers']}")
    return Trainer(model, made, **keywords)


@contextmanager
def local(uri: str) -> Iterator[Path]:
    """The path of a file that may be elsewhere, as a copy for as long as it is needed."""
    if "://" not in uri:
        yield Path(uri)
        return
    from pyarrow import fs

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / uri.rpartition("/")[2]
        system, path = fs.FileSystem.from_uri(uri)
        fs.copy_files(path, str(copy), source_filesystem=system, destination_filesystem=fs.LocalFileSystem())
        yield copy


def load(uri: str) -> keras.Model:
    """The model, with what it is compiled with.

    Raises:
        ConfigurationError: there is none, or Keras cannot load it.
    """
    import keras

    try:
        with local(uri) as path:
            return keras.saving.load_model(path)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"`--model` must be a model that Keras saved. Received: --model {uri}: {error}"
        ) from error


def target(uri: str, overwrite: bool) -> tuple[Any, str]:
    """File system and path of the folder to write to; made if it is not there.

    Raises:
        ConfigurationError: it holds something and ``overwrite`` is not set, or it cannot be made.
    """
    import pyarrow as pa
    from pyarrow import fs

    try:
        system, path = fs.FileSystem.from_uri(uri) if "://" in uri else (fs.LocalFileSystem(), os.path.abspath(uri))
        system.create_dir(path, recursive=True)
        holds = system.get_file_info(fs.FileSelector(path))
    except (OSError, pa.ArrowException) as error:
        raise ConfigurationError(f"`--out` must be a folder to write to. Received: --out {uri}: {error}") from error
    if holds and not overwrite:
        raise ConfigurationError(f"`--out` must be new or empty, unless --overwrite is given. Received: --out {uri}")
    return system, path


def save(trainer: Trainer, folder: Path, arguments: argparse.Namespace, *, plots: bool) -> None:
    """Everything that the job has left, into a new local folder."""
    import pyarrow.parquet as pq

    from distkeras.analysis import metrics

    folder.mkdir(parents=True, exist_ok=True)
    history, commits = trainer.history.toArrow(), trainer.commits.toArrow()
    trainer.model.save(folder / "model.keras")
    pq.write_table(history, folder / "history.parquet")
    pq.write_table(commits, folder / "commits.parquet")
    summary = {
        "rule": trainer.rule.name,
        "hyper_parameters": trainer.rule.config(),
        "workers": len(commits["worker"].unique()),
        "commits": len(commits),
        "samples": sum(history["samples"].to_pylist()),
        "seconds": trainer.timings,
        "options": {name: value for name, value in vars(arguments).items() if value not in (None, [])},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if plots:
        from distkeras.analysis.plots import curves, staleness

        run = history.to_pandas()
        for name in run.columns.difference(metrics.HISTORY_KEYS):
            curves({trainer.rule.name: run}, name, folder / f"{name}.png")
        staleness(commits.to_pandas(), folder / "staleness.png")


def run(arguments: argparse.Namespace) -> None:
    """The job. What cannot work fails before Spark starts."""
    from pyspark.sql import SparkSession

    for module in getattr(arguments, "import") or ():
        importlib.import_module(module)
    drawn = importlib.util.find_spec("matplotlib") is not None
    if arguments.plots and not drawn:
        raise ConfigurationError("`--plots` needs matplotlib: pip install 'distkeras[plots]'. Received: --plots")
    saving = saving_of(arguments)
    trainer = trainer_of(arguments, load(arguments.model))
    system, path = target(arguments.out, bool(arguments.overwrite))
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # run as a plain script, not by spark-submit
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.getOrCreate()
    try:
        df: DataFrame = spark.read.parquet(arguments.data)
        trainer.train(df, **saving)
        with tempfile.TemporaryDirectory() as folder:
            several = getattr(trainer, "trainers", None)
            for place, one in enumerate(several or [trainer]):
                home = Path(folder, str(place)) if several else Path(folder)
                save(one, home, arguments, plots=drawn and arguments.plots is not False)
            from pyarrow import fs

            fs.copy_files(folder, path, source_filesystem=fs.LocalFileSystem(), destination_filesystem=system)
    finally:
        spark.stop()
    print(f"Model, history and commits are in {arguments.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for an error that has a name."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from pyspark.errors import PySparkException

    debug = False
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        debug = bool(arguments.debug)
        run(arguments)
    except (DistkerasError, ImportError, OSError, PySparkException) as error:
        if debug:
            raise
        told = str(error).partition("\n\nRemote traceback:")[0]
        print(f"train.py: {type(error).__name__}: {' '.join(told.split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
