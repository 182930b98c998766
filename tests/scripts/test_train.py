from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from support.programs import spark_submit

from distkeras import Padding, Trainer, __version__
from distkeras.commands import console
from distkeras.commands.main import main
from distkeras.data.datasets import write_parquet
from distkeras.flags import RENAMED, trainer_keywords, values_of
from distkeras.ps import rules
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError
from distkeras.settings import DEFAULT_RULE, options_of

# Keras: a model that was compiled and saved before it was trained has an optimizer without variables.
pytestmark = pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"
#: The option that the guide recommends; `training/test_cluster` trains without it.
WARM = "spark.python.daemon.module=distkeras.spark.daemon"
LOSS = "sparse_categorical_crossentropy"
ROWS = 300


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data.parquet, model.keras, and compiled.keras."""
    folder = tmp_path_factory.mktemp("files")
    features = np.random.default_rng(0).random((ROWS, 4)).astype(np.float32)
    labels = (features.sum(axis=1) > 2).astype(np.int64)
    write_parquet(folder / "data.parquet", features, labels)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    model.save(folder / "model.keras")
    model.compile("adam", LOSS, metrics=["accuracy"])
    model.save(folder / "compiled.keras")
    return folder


def needed(files: Path, *more: str) -> list[str]:
    """Return the required options, followed by ``more``."""
    return ["--data", str(files / "data.parquet"), "--model", str(files / "model.keras"), "--out", "out", *more]


# ---- options


def test_every_argument_of_the_trainer_has_a_flag(train: ModuleType) -> None:
    reached = {RENAMED.get(flag, flag) for flag in train.parser().options()} | {"worker_optimizer"}
    by_other_means = {"self", "model", "rule", "decode", "custom_objects", "deadlines", "resources"}
    assert set(options_of(Trainer)) - by_other_means <= reached


def test_the_help_of_flags_equals_the_trainers_docstring(train: ModuleType) -> None:
    options = train.parser().options()
    assert options["batch_size"].help == "rows of one mini-batch of one worker (default: 32)"
    assert options["threads"].help == "compute threads of one worker (default: the cores that Spark gives to a task)"
    assert options["shuffle"].help == "whether each epoch has a new row order (default: on)"
    assert options["partitioned_already"].help.startswith("whether df already has --workers partitions")


def test_the_output_folder_is_checked(train: ModuleType, files: Path) -> None:
    def saving(*options: str) -> dict[str, object]:
        return train.saving_of(train.parser().parse_with_file(needed(files, *options)))

    assert saving("--rule", "agn") == {}
    assert saving("--rule", "agn", "--checkpoint", "there") == {"checkpoint": Checkpoint("there"), "resume": False}
    given = saving("--rule", "agn", "--checkpoint", "there", "--checkpoint-every", "7", "--resume")
    assert given == {"checkpoint": Checkpoint("there", 7), "resume": True}
    for bad in (["agn", "--resume"], ["agn", "--checkpoint-every", "7"], ["ensemble", "--checkpoint", "there"]):
        with pytest.raises(ConfigurationError, match="`--checkpoint"):
            saving("--rule", *bad)


def test_help_names_every_rule(train: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        train.main(["--help-all"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in rules.all_rules())
    assert "--rule RULE" in printed
    assert "'ensemble'" in printed


def test_the_short_help_fits_a_screen(train: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        train.main(["--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert lines[-1].startswith("distkeras train --help-all shows all ")


@pytest.mark.slow
def test_every_rule_can_be_selected(train: ModuleType, files: Path) -> None:
    parser, model = train.parser(), train.load_model(str(files / "model.keras"))
    for rule in rules.all_rules():
        options = ["--rule", rule, "--optimizer", "sgd", "--loss", LOSS, "--workers", "2"]
        trainer = train.trainer_of(parser.parse_with_file(needed(files, *options)), model)
        assert (trainer.rule.name, trainer.settings.num_workers) == (rule, 2)


@pytest.mark.slow
def test_the_trainers_without_a_rule_can_be_selected(train: ModuleType, files: Path) -> None:
    model = train.load_model(str(files / "compiled.keras"))
    single = train.trainer_of(train.parser().parse_with_file(needed(files, "--rule", "single")), model)
    assert (single.rule.name, single.settings.num_workers) == ("downpour", 1)
    ensemble = train.trainer_of(
        train.parser().parse_with_file(needed(files, "--rule", "ensemble", "--workers", "3")), model
    )
    assert [one.settings.num_workers for one in ensemble.trainers] == [1, 1, 1]
    with pytest.raises(ConfigurationError, match=r"`--workers` must be 1.*Received: 2"):
        train.trainer_of(train.parser().parse_with_file(needed(files, "--rule", "single", "--workers", "2")), model)


def test_values_are_parsed_as_json_unless_the_rule_takes_a_text(train: ModuleType, files: Path) -> None:
    arguments = train.parser().parse_with_file(
        needed(files, "--rule", "adag", "--set", "form=4.1", "gamma=1e-3", "--set", "normalize=false", "--loss", LOSS)
    )
    rule = train.trainer_of(arguments, train.load_model(arguments.model)).rule
    assert (rule.form, rule.gamma, rule.normalize) == ("4.1", 1e-3, False)


def test_optimizer_and_weights_are_passed_on(train: ModuleType, files: Path) -> None:
    optimizer = ["--optimizer", "adam", "--optimizer-set", "learning_rate=0.25", "beta_1=0.5"]
    others = ["--class-weight", "0=1", "1=2.5", "--loss", LOSS, "--features", "a", "--no-shuffle"]
    arguments = train.parser().parse_with_file(needed(files, "--rule", "agn", *optimizer, *others))
    keywords = trainer_keywords(arguments)
    adam = keywords.pop("worker_optimizer")
    assert (float(adam.learning_rate), adam.beta_1) == (0.25, 0.5)
    assert keywords == {"class_weight": {0: 1.0, 1: 2.5}, "loss": LOSS, "features_col": ["a"], "shuffle": False}


@pytest.mark.parametrize(
    ("given", "in_file", "expected"),
    [
        (["longest=20", "side=pre"], "longest = 20\nside = 'pre'", Padding(longest=20, side="pre")),
        (['a={"multiple": "few"}', 'b={"value": 3}'], None, {"a": Padding(multiple="few"), "b": Padding(3)}),
    ],
)
def test_a_padding_is_of_all_columns_or_by_column(
    train: ModuleType, files: Path, tmp_path: Path, given: list[str], in_file: str | None, expected: Any
) -> None:
    arguments = train.parser().parse_with_file(needed(files, "--rule", "agn", "--padding", *given))
    assert trainer_keywords(arguments)["padding"] == expected
    if in_file is not None:
        (tmp_path / "job.toml").write_text(f"[padding]\n{in_file}\n")
        arguments = train.parser().parse_with_file(
            needed(files, "--rule", "agn", "--config", str(tmp_path / "job.toml"))
        )
        assert trainer_keywords(arguments)["padding"] == expected


@pytest.mark.parametrize("in_file", [False, True])
def test_only_weights_of_classes_may_be_balanced(train: ModuleType, files: Path, tmp_path: Path, in_file: bool) -> None:
    given = ["--class-weight", "balanced"]
    if in_file:
        (tmp_path / "job.toml").write_text('class_weight = "balanced"\n')
        given = ["--config", str(tmp_path / "job.toml")]
    arguments = train.parser().parse_with_file(needed(files, "--rule", "agn", *given))
    assert trainer_keywords(arguments)["class_weight"] == "balanced"
    with pytest.raises(SystemExit):
        train.parser().parse_with_file(needed(files, "--rule", "agn", "--set", "balanced"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--label", "a", "b", "--sample-weight", "w"], {"label_col": ["a", "b"], "sample_weight_col": "w"}),
        (
            ["--label", "kind=k", "spare=", "--sample-weight", "kind=w", "spare="],
            {"label_col": {"kind": "k", "spare": None}, "sample_weight_col": {"kind": "w", "spare": None}},
        ),
        (["--label"], {"label_col": []}),
    ],
)
def test_labels_and_weights_of_outputs_have_flags(
    train: ModuleType, files: Path, flags: list[str], expected: dict[str, Any]
) -> None:
    assert trainer_keywords(train.parser().parse_with_file(needed(files, "--rule", "agn", *flags))) == expected


def test_an_optimizer_of_this_package_can_be_named(train: ModuleType, files: Path) -> None:
    optimizer = ["--optimizer", "lazymomentum", "--optimizer-set", "momentum=0.5"]
    arguments = train.parser().parse_with_file(needed(files, "--rule", "agn", "--loss", LOSS, *optimizer))
    if keras.backend.backend() == "tensorflow":
        assert trainer_keywords(arguments)["worker_optimizer"].momentum == 0.5
    else:
        with pytest.raises(ConfigurationError, match="LazyMomentum needs Keras on TensorFlow"):
            trainer_keywords(arguments)


# ---- the file


def test_flags_override_the_file(train: ModuleType, files: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text(
        f"""
        data = "{files / "data.parquet"}"
        model = "{files / "model.keras"}"
        out = "from file"
        rule = "aeasgd"
        workers = 4
        epochs = 3
        shuffle = false
        progress = true
        metrics = ["accuracy", "mse"]
        features = "pixels"
        set = {{window = 7, rho = 2.5}}
        [optimizer_set]
        learning_rate = 0.5
        nesterov = true
        """
    )
    flags = ["--workers", "2", "--shuffle", "--metrics", "mae", "--set", "rho=1.5", "--optimizer", "sgd"]
    arguments = train.parser().parse_with_file(["--config", str(config), *flags])
    assert (arguments.out, arguments.rule, arguments.workers, arguments.epochs) == ("from file", "aeasgd", 2, 3)
    assert (arguments.shuffle, arguments.progress) == (True, True)
    assert (arguments.metrics, arguments.features) == (["mae"], ["pixels"])
    assert values_of(arguments.set) == {"window": 7, "rho": 1.5}
    assert values_of(arguments.optimizer_set) == {"learning_rate": 0.5, "nesterov": True}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker = 2", "must be one of .*workers.* Received: worker"),
        ("set = 4", "`set` in .* must be a table. Received: set=4"),
        ("shuffle = 1", "`shuffle` in .* must be true or false"),
        ("config = 'other.toml'", "Received: config"),
        ("not toml", "`--config` must be a TOML file"),
        (None, "`--config` must be a TOML file"),
    ],
)
def test_invalid_files_are_refused(train: ModuleType, tmp_path: Path, text: str | None, expected: str) -> None:
    config = tmp_path / "job.toml"
    if text is not None:
        config.write_text(text)
    with pytest.raises(ConfigurationError, match=expected):
        train.parser().parse_with_file(["--config", str(config)])


# ---- errors


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rule", "hogwild", "--loss", LOSS], "`rule` must be one of adag"),
        (["--rule", "agn", "--set", "gamma=1", "--loss", LOSS], "rule 'agn' takes window, window_max. Received: gamma"),
        (["--rule", "agn"], "`loss` must be given"),
        (["--rule", "agn", "--loss", LOSS, "--workers", "0"], "`num_workers` must be a positive integer"),
        (["--rule", "agn", "--loss", LOSS, "--optimizer", "adamm"], "`--optimizer` and `--optimizer-set` must be"),
        (["--rule", "agn", "--loss", LOSS, "--optimizer-set", "learning_rate=1"], "`--optimizer-set` needs"),
        (["--rule", "agn", "--loss", LOSS, "--padding", "shoe=1"], "`padding` must be of the fields"),
        (["--rule", "agn", "--loss", LOSS, "--class-weight", "shoe=1"], "`--class-weight` must be CLASS=WEIGHT"),
        (["--rule", "agn", "--loss", LOSS, "--model", "none.keras"], "`--model` must be a model that Keras saved"),
        (["--rule", "agn", "--loss", LOSS, "--import", "no_such_module"], "No module named 'no_such_module'"),
        (["--rule", "agn", "--loss", LOSS, "--out", "."], "`--out` must be new or empty"),
    ],
)
def test_an_error_is_one_line_and_status_2(
    train: ModuleType,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(files)
    assert train.main(needed(files, *options)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("distkeras train: ")
    assert expected in line


@pytest.mark.parametrize("options", [["--rule", "agn", "--workers", "two"], ["--set", "window"]])
def test_the_parser_refuses_invalid_options(train: ModuleType, files: Path, options: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        train.main(needed(files, *options))
    assert end.value.code == 2


def test_a_misspelled_option_is_one_line_with_a_suggestion(
    train: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for call, meant in (
        (lambda: train.main(["--bacth-size", "3"]), "--batch-size"),
        (lambda: main(["trian"]), "train"),
        (lambda: main(["jobs", "list", "--stat", "x"]), "--state"),
    ):
        with pytest.raises(SystemExit) as end:
            call()
        assert end.value.code == 2
        assert f"did you mean {meant}?" in capsys.readouterr().err.splitlines()[-1]


def test_the_version_is_printed(train: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for call in (train.main, main):
        with pytest.raises(SystemExit) as end:
            call(["--version"])
        assert end.value.code == 0
        assert capsys.readouterr().out == f"distkeras {__version__}\n"


def test_the_rule_of_the_trainer_is_the_default(train: ModuleType, files: Path) -> None:
    trainer = train.trainer_of(
        train.parser().parse_with_file(needed(files, "--loss", LOSS)), train.load_model(str(files / "model.keras"))
    )
    assert trainer.rule == DEFAULT_RULE


@pytest.mark.parametrize(
    "kind",
    [
        "csv",
        pytest.param("json", marks=pytest.mark.slow),
        pytest.param("orc", marks=pytest.mark.slow),
        "table",
        "parquet",
    ],
)
def test_each_format_is_read(train: ModuleType, spark: SparkSession, tmp_path: Path, kind: str) -> None:
    rows = spark.createDataFrame([(0.5, 1), (1.5, 0)], "x double, label int")
    place = str(tmp_path / f"rows.{kind}")
    if kind == "table":
        rows.createOrReplaceTempView(place := "rows_of_this_test")
    else:
        rows.coalesce(1).write.format(kind).option("header", True).save(place)
    given = ["--format", kind] if kind == "table" else []
    words = ["--data", place, "--model", "m", "--out", "o", *given]
    read = console.read(spark, train.parser().parse_with_file(words))
    assert sorted(map(tuple, read.select("x", "label").collect())) == [(0.5, 1), (1.5, 0)]


def test_data_that_spark_cannot_read_are_one_line(
    train: ModuleType, spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noise.parquet").write_bytes(b"noise" * 1000)
    for name, kind in (("noise.parquet", "parquet"), ("none.csv", "csv"), ("no_table", "table")):
        place = name if kind == "table" else str(tmp_path / name)
        words = ["--data", place, "--model", "m", "--out", "o", "--format", kind]
        with pytest.raises(ConfigurationError, match=rf"^`--data` must be .*Received: --data {place}: .+") as caught:
            console.read(spark, train.parser().parse_with_file(words))
        assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


# ---- whole jobs


def words_of_a_job(files: Path, folder: Path, out: Path) -> list[str]:
    """Return the words of a command whose flags override the file that it names."""
    (folder / "job.toml").write_text(
        f'rule = "downpour"\nset = {{window = 5}}\nepochs = 9\nworkers = 2\nloss = "{LOSS}"\nmetrics = ["accuracy"]\n'
    )
    words = ["--config", str(folder / "job.toml"), *needed(files), "--out", str(out), "--rule", "agn"]
    return [*words, "--set", "window=4", "--epochs", "2", "--batch-size", "32", "--optimizer", "adam"]


def check_job(out: Path, printed: str) -> None:
    """Check the files and the report of such a job."""
    names = {path.name for path in out.iterdir()}
    tables = {"history.parquet", "commits.parquet", "summary.json"}
    assert names == tables | {"model.keras", "loss.png", "accuracy.png", "staleness.png"}
    history, commits = pq.read_table(out / "history.parquet"), pq.read_table(out / "commits.parquet")
    assert sum(history["samples"].to_pylist()) == 2 * ROWS
    assert sorted(set(commits["worker"].to_pylist())) == [0, 1]
    assert keras.saving.load_model(out / "model.keras").count_params() == 10
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["rule"], summary["hyper_parameters"]) == ("agn", {"window": 4})
    assert [(row["epoch"], row["samples"]) for row in summary["epochs"]] == [(1, ROWS), (2, ROWS)]
    for row, (_, part) in zip(summary["epochs"], history.to_pandas().groupby("epoch"), strict=True):
        assert row["loss"] == pytest.approx(np.average(part["loss"], weights=part["samples"]))
        assert row["accuracy"] == pytest.approx(np.average(part["accuracy"], weights=part["samples"]))
    lines = printed.splitlines()
    (start,) = [place for place, line in enumerate(lines) if line.startswith("agn: 600 samples and ")]
    assert [line.split()[:2] for line in lines[start + 1 : start + 4]] == [
        ["epoch", "samples"],
        ["1", "300"],
        ["2", "300"],
    ]
    assert lines[start + 4] == f"Model, history and commits are in {out}"


def test_a_job_writes_its_model_its_tables_and_a_report(
    train: ModuleType,
    spark: SparkSession,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The session must survive the command.
    monkeypatch.setattr(train, "spark_session", lambda: contextlib.nullcontext(spark))
    out = tmp_path / "out"
    assert train.main(words_of_a_job(files, tmp_path, out)) == 0
    check_job(out, capsys.readouterr().out)


@pytest.mark.slow
def test_spark_submit_runs_a_job(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = spark_submit(tmp_path, SCRIPT, *words_of_a_job(files, tmp_path, out), conf=WARM)
    assert done.returncode == 0, done.stderr[-5000:]
    check_job(out, done.stdout)


@pytest.mark.slow
def test_spark_submit_passes_an_error_on(files: Path, tmp_path: Path) -> None:
    words = needed(files, "--rule", "agn", "--loss", LOSS, "--workers", "2", "--features", "pixels")
    done = spark_submit(tmp_path, SCRIPT, *words, conf=WARM)
    assert done.returncode == 2
    # spark-submit sends a script's standard error to standard output.
    printed = (done.stdout + done.stderr).splitlines()
    (line,) = [line for line in printed if line.startswith("distkeras train: ")]
    assert "MissingColumnError" in line
    assert "'pixels'" in line
    assert not list((tmp_path / "out").glob("*")), "a failed job writes no model"
