"""Trains a Keras model on rows that Spark reads, under any update rule.

Leaves in OUT: model.keras, history.parquet (a row per mini-batch), commits.parquet (a row per commit), summary.json
with what is printed at the end, and, where matplotlib is installed, plots of each metric against time and of the
staleness.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkeras import Checkpoint, EnsembleTrainer, Trainer
from distkeras.commands.console import (
    add_common_flags,
    add_data_flags,
    load_model,
    read,
    run_command,
    spark_session,
)
from distkeras.flags import PAIRS, SWITCH, TomlArgumentParser, add_trainer_flags, trainer_keywords, values_of
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import all_rules, from_text, make
from distkeras.ps.world.files import file_system
from distkeras.results import write_files
from distkeras.settings import DEFAULT_RULE

if TYPE_CHECKING:
    import keras


#: What `--rule` takes in addition to the rules: trainers without one.
SINGLE, ENSEMBLE = "single", "ensemble"

#: The options of the short help, and its example.
FIRST = (
    "data", "format", "model", "out", "rule", "set", "workers", "epochs", "batch_size", "optimizer", "optimizer_set",
    "loss", "metrics", "features", "label", "checkpoint", "resume",
)  # fmt: skip
SHORT_EXAMPLE = """\
example:
  distkeras train --data train.csv --model model.keras --out out --workers 2 --epochs 3 \\
      --optimizer adam --loss sparse_categorical_crossentropy --metrics accuracy
"""
EXAMPLE = """\
example, with `spark-submit --master 'local[2,4]' scripts/train.py` in place of `distkeras train` on a cluster:
  distkeras train --data train.parquet --model model.keras --out out \\
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


def parser() -> TomlArgumentParser:
    """Return the parser of all options."""
    main = TomlArgumentParser(
        prog="distkeras train",
        description=__doc__,
        epilog=f"{EXAMPLE}\n{_rules_text()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        first=FIRST,
        example=SHORT_EXAMPLE,
    )
    files = main.add_argument_group("files (paths, or URIs that Arrow's file systems know)")
    add_data_flags(files, "rows to train on, at any place that Spark can read")
    files.add_argument("--model", required=True, help="built model, as Keras saves it (.keras)")
    files.add_argument("--out", required=True, help="folder to write to; new or empty")
    files.add_argument("--overwrite", **SWITCH, help="overwrite the results of an earlier run in --out")
    files.add_argument("--plots", **SWITCH, help="draw plots (default: if matplotlib is installed)")
    rule = main.add_argument_group("rule")
    rule.add_argument(
        "--rule",
        help=f"a rule below (default: {DEFAULT_RULE.name}); '{SINGLE}' for sequential training on one executor; "
        f"'{ENSEMBLE}' for --workers independent models, each trained on its own part of the rows and written to "
        "OUT/0, OUT/1 and so on",
    )
    rule.add_argument("--set", **PAIRS, help="hyper-parameters of the rule")
    training = main.add_argument_group("training")
    add_trainer_flags(training)
    saving = main.add_argument_group("recovery")
    saving.add_argument("--checkpoint", metavar="URI", help="folder for snapshots of the server, for this job only")
    every = "commits from one snapshot to the next (default: 100)"
    saving.add_argument("--checkpoint-every", type=int, metavar="COMMITS", help=every)
    saving.add_argument("--resume", **SWITCH, help="continue the job in --checkpoint, if there is one")
    add_common_flags(main)
    return main


def _rules_text() -> str:
    lines = ["rules, with what --set takes and the defaults:"]
    for name, rule in all_rules().items():
        options = " ".join(f"{field.name}={json.dumps(field.default)}" for field in dataclasses.fields(rule))
        lines.append(f"  {name:<16} {options}")
    return "\n".join(lines)


def saving_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of `Trainer.train` that were given; raise ConfigurationError if one lacks another."""
    uri, every, resume = arguments.checkpoint, arguments.checkpoint_every, bool(arguments.resume)
    if uri is None and (resume or every is not None):
        raise ConfigurationError("`--resume` and `--checkpoint-every` need `--checkpoint`. Received: none")
    if uri is None:
        return {}
    if arguments.rule is not None and arguments.rule.lower() == ENSEMBLE:
        raise ConfigurationError(f"`--checkpoint` must be of one job. Received: --rule {ENSEMBLE}")
    return {"checkpoint": Checkpoint(uri) if every is None else Checkpoint(uri, every), "resume": resume}


def trainer_of(arguments: argparse.Namespace, model: keras.Model) -> Any:
    """Return the trainer that the options ask for; raise ConfigurationError if they cannot work."""
    given = trainer_keywords(arguments)
    if arguments.rule is None:
        if arguments.set:
            raise ConfigurationError(f"`--set` needs `--rule`. Received: {values_of(arguments.set)} for the default")
        return Trainer(model, **given)
    name = arguments.rule.lower()
    rule = {SINGLE: "downpour", ENSEMBLE: "downpour"}.get(name, name)
    options = from_text(rule, arguments.set)
    if name in (SINGLE, ENSEMBLE):
        options = {"window": 10, **options}  # only how often it reports: no other worker commits between
    rule_object = make(rule, **options)
    if name == ENSEMBLE:
        count = given.pop("num_workers", 2)
        metrics = given.pop("metrics", None)
        return EnsembleTrainer(model, metrics=metrics, num_ensembles=count, window=rule_object.window, **given)
    if name == SINGLE and given.setdefault("num_workers", 1) != 1:
        raise ConfigurationError(f"`--workers` must be 1 for --rule {SINGLE}. Received: {given['num_workers']}")
    return Trainer(model, rule_object, **given)


def target(uri: str, overwrite: bool) -> tuple[Any, str]:
    """Return file system and path of the output folder, made if need be; raise ConfigurationError for one in use."""
    import pyarrow as pa
    from pyarrow import fs

    try:
        system, path = file_system(uri)
        system.create_dir(path, recursive=True)
        holds = system.get_file_info(fs.FileSelector(path))
    except (OSError, pa.ArrowException) as error:
        raise ConfigurationError(f"`--out` must be a folder to write to. Received: --out {uri}: {error}") from error
    if holds and not overwrite:
        raise ConfigurationError(f"`--out` must be new or empty, unless --overwrite is given. Received: --out {uri}")
    return system, path


def save(trainer: Trainer, folder: Path, arguments: argparse.Namespace, *, plots: bool) -> None:
    """Write the model, the tables, a summary and the plots of a job into a new local folder."""
    import pandas as pd

    from distkeras.analysis.metrics import with_elements

    folder.mkdir(parents=True, exist_ok=True)
    numbers = write_files(trainer, folder)
    history = with_elements(pd.read_parquet(folder / "history.parquet"))
    summary = {
        "rule": trainer.rule.name,
        "hyper_parameters": trainer.rule.config(),
        **numbers,
        "epochs": trainer.epochs.toArrow().to_pylist(),
        "options": {name: value for name, value in vars(arguments).items() if value not in (None, [])},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    sys.stdout.write(report_of(summary))
    if plots:
        from distkeras.analysis.metrics import HISTORY_KEYS
        from distkeras.analysis.plots import curves, staleness

        for name in history.columns.difference(HISTORY_KEYS):
            curves({trainer.rule.name: history}, name, folder / f"{name}.png")
        staleness(pd.read_parquet(folder / "commits.parquet"), folder / "staleness.png")


def report_of(summary: dict[str, Any]) -> str:
    """Return what is printed at the end: a line about the job, and a row for each epoch."""
    seconds = summary["seconds"]["total"]
    lines = [
        f"{summary['rule']}: {summary['samples']:,} samples and {summary['commits']:,} commits of "
        f"{summary['workers']} workers in {seconds:.1f} s"
    ]
    epochs = summary["epochs"]
    names = list(epochs[0]) if epochs else []
    lines.append("  ".join(f"{name:>{_width(name)}}" for name in names))
    for row in epochs:
        texts = (f"{row[name]:,}" if isinstance(row[name], int) else f"{row[name]:.4f}" for name in names)
        lines.append("  ".join(f"{text:>{_width(name)}}" for name, text in zip(names, texts, strict=True)))
    return "\n".join(lines) + "\n"


def _width(name: str) -> int:
    return max(10, len(name))


def stop_message(trainer: Any, arguments: argparse.Namespace) -> str:
    """Return what Ctrl-C prints: how far the job has come, and how it can be continued."""
    outcome = getattr(trainer, "outcome", None)
    records = None if outcome is None else outcome.records
    ledger = None if records is None else records.ledger().to_pandas()
    if ledger is None or ledger.empty:
        done = "Nothing had been committed."
    else:
        done = f"{len(ledger):,} commits were applied; the latest are of epoch {int(ledger['epoch'].max()) + 1}."
    if arguments.checkpoint is None:
        return f"{done} A job with --checkpoint can be continued. This one begins again."
    return f"{done} The same command with --resume continues from {arguments.checkpoint}."


def run(arguments: argparse.Namespace) -> None:
    """Do what the command line asks for; what cannot work fails before Spark starts."""
    drawn = importlib.util.find_spec("matplotlib") is not None
    if arguments.plots and not drawn:
        raise ConfigurationError("`--plots` needs matplotlib: pip install 'distkeras[plots]'. Received: --plots")
    saving = saving_of(arguments)
    trainer = trainer_of(arguments, load_model(arguments.model))
    system, path = target(arguments.out, bool(arguments.overwrite))
    with spark_session() as spark:
        df = read(spark, arguments)
        try:
            trainer.train(df, **saving)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(stop_message(trainer, arguments)) from None
        with tempfile.TemporaryDirectory() as folder:
            several = getattr(trainer, "trainers", None)
            for place, member in enumerate(several or [trainer]):
                home = Path(folder, str(place)) if several else Path(folder)
                save(member, home, arguments, plots=drawn and arguments.plots is not False)
            from pyarrow import fs

            fs.copy_files(folder, path, source_filesystem=fs.LocalFileSystem(), destination_filesystem=system)
    sys.stdout.write(f"Model, history and commits are in {arguments.out}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0; 2 for an error that has a name; 130 after Ctrl-C."""
    return run_command("distkeras train", parser, run, argv)
