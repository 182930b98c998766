"""The options of a `Trainer`: typed, and checked once, in the trainer's constructor.

An option is declared once, with its type, default and text: as an argument of `Trainer`, or as a field of one of the
groups `Network`, `Executors` and `Monitoring`. Command line, estimator, job server and docs read it there
(`options_of`). The settings that act on it have a field of its name: `TrainSettings` for the data and the driver,
`ServerSettings` and `WorkerSettings` of `ps.settings` for the others.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypedDict, TypeVar

from distkeras.data.batches import DataSpec
from distkeras.data.binding import Entries, entries_of, listed, names_of
from distkeras.data.padding import buckets, padding_json, paddings_of
from distkeras.data.rows import Padding
from distkeras.data.schema import decoders, require_class_weight
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule, make
from distkeras.ps.rules.base import AUTO
from distkeras.ps.rules.schedules import Schedule
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.transport.client import make_certificate
from distkeras.ps.validate import check_fields, checked, count, flag, invalid, positive, require_choice, require_text
from distkeras.ps.world.files import require_place

_S = TypeVar("_S")
_P = ParamSpec("_P")

#: The rule of a trainer or estimator that names none: movements in full, but for weights that other workers have moved
#: far meanwhile. The page on choosing a rule has the study that it rests on.
DEFAULT_RULE = make("adag", window=AUTO, normalize=False)
#: The same where commits name the rows of tables, or vectors are rounded on the wire, which ADAG does not allow.
DEFAULT_RULE_FOR_ROWS = make("delay_adaptive", window=AUTO, threshold=4)

#: Settings of where and how a job runs, with which it learns neither more nor less.
_OPERATIONAL = {
    "deadlines",
    "checkpoint",
    "max_body",
    "host",
    "port",
    "progress",
    "log_every",
    "stall_after",
    "decode",
    "resources",
    "shared_memory",
    "shards",
}


@dataclass(frozen=True)
class Network:
    """The connections of workers, driver and parameter server: the argument ``network`` of `Trainer`.

    Args:
        server: where the parameter server runs: "driver", in a process next to the driver; or "cluster", as a Spark
            task of its own, for drivers that executors cannot reach (Spark Connect to a remote cluster). The task takes
            a slot, and needs a `checkpoint` in a folder that every executor can reach, where it writes its address.
            With `shards`, so does each of them.
        host: the driver's address for executors. Default: loopback for a local master, else ``spark.driver.host``.
        port: port of the parameter server; 0 for any free port.
        tls: encrypt the connections of workers, driver and server; needs the package cryptography on the driver.
        wire_format: format of the vectors between workers and server: "float32"; "bfloat16", half the bytes; or
            "int8", a quarter of the bytes. With "int8", a worker adds its rounding error to its next commit, and the
            server sends the change of the center, so that rounding errors do not add up. The center itself stays
            float32. Rules that rely on the exact vector that was sent accept only "float32": the elastic rules, ADAG,
            DANA-DC and DC-ASGD.
        overlap: compute the next window while a commit is sent, for slow links. A window then begins from the reply to
            the previous commit; its staleness counts all commits since that reply, including the worker's own. Each
            worker keeps its own moving statistics. For `downpour`, `agn` and `asgd`.
        shared_memory: let a worker on the parameter server's host exchange vectors with it through shared memory, which
            takes less time than a connection; the numbers are the same. Server and worker check whether this works
            (Linux, same user, same container); otherwise they use the connection. The same holds between workers of
            one host, with relays and with `daso`.
        relays: "host": the workers of each host form a group; one of them, the relay, adds up the movements of all and
            sends the sum as one commit, so that a hundred workers on ten hosts load the server like ten workers. A
            number: the number of groups, in the order of the workers. A group advances together, and its commit has
            the staleness of its stalest worker. All workers must run at once when the job begins. For `downpour`,
            `agn`, `dynsgd`, `delay_adaptive` and `adag` (Algorithm 12). Default: each worker sends its own commits.
        shards: number of processes among which the elements of the model are divided, for models that are too large for
            one process or for its link. They run next to the driver; with `server="cluster"`, as Spark tasks, on
            different hosts where Spark has free slots there. The numbers are the same as with one. Not with relays,
            `daso` or `measure_gap`. Default: 1, one server has all elements.
    """

    server: str = "driver"
    host: str | None = None
    port: int = ServerSettings.port
    tls: bool = False
    wire_format: str = WorkerSettings.wire_format
    overlap: bool = WorkerSettings.overlap
    shared_memory: bool = WorkerSettings.shared_memory
    relays: int | str | None = ServerSettings.relays
    shards: int = ServerSettings.shards


@dataclass(frozen=True)
class Executors:
    """The resources of each worker on its executor: the argument ``executors`` of `Trainer`.

    Args:
        threads: compute threads of one worker. Default: the cores that Spark gives to a task.
        resources: a `pyspark.resource.ResourceProfile` for the stage that trains: cores and GPUs of a worker's task
            and, with dynamic allocation, of its executors. Not on a local master. Default: as Spark's settings say.
        spool_bytes: bytes of memory for rows that a worker keeps for later epochs; further rows go to a file.
        keep_optimizer: keep the state of each worker's optimizer (momentum, moments, accumulators, the position in a
            learning rate schedule), and the vectors that its rule keeps at the worker (a momentum, the parameters of an
            elastic worker), at the parameter server and in its checkpoint, so that the next attempt at the partition
            begins with them. The time between two states is chosen so that sending them takes at most 2% of the
            worker's time. The server needs memory or temporary disk space for n states, where n is the number of
            workers.
        lends: a worker that has none of its own mini-batches left trains some of the worker that is expected to end
            last, whose task sends them. Each mini-batch is trained once, as ever. So a job is not as slow as its
            slowest worker or its largest partition. Default: if rule and options allow it, and rows are kept, which
            is so with several epochs or a checkpoint.
        helpers: how many further tasks, without rows of their own, train what workers lend. Each takes a slot that is
            free, when there is one, and leaves it when a task of the job needs one. With dynamic allocation, Spark
            starts executors for them.
    """

    threads: int | None = None
    resources: Any = None
    spool_bytes: int = DataSpec.spool_bytes
    keep_optimizer: bool = WorkerSettings.keep_optimizer
    lends: bool | None = None
    helpers: int = 0


@dataclass(frozen=True)
class Monitoring:
    """The reports of a running job: the argument ``monitoring`` of `Trainer`.

    Args:
        progress: show a progress bar. Default: on a terminal and in a notebook.
        log_every: seconds between log lines about the progress (level INFO), if no bar is shown; None: no lines.
        stall_after: seconds without a commit after which the log and `events` name a worker; None: never.
        measure_gap: fill the column `gap` of `commits`, at the cost of one more pass over the vector at each commit.
            The gap is measured to the center as it was before `wire_format` rounded it.
        check_model: before the first job, compare a step of the given model with one of the model that workers rebuild,
            on a few drawn rows. What a model has and its description lacks would be lost otherwise without a word.
    """

    progress: bool | None = None
    log_every: float | None = 30.0
    stall_after: float | None = 300.0
    measure_gap: bool = ServerSettings.measure_gap
    check_model: bool = True


#: The arguments of `Trainer` that are groups of options.
GROUPS: dict[str, type[Any]] = {"network": Network, "executors": Executors, "monitoring": Monitoring}


class KerasNames(TypedDict, total=False):
    """The names that Keras has for arguments of `Trainer` and `KerasEstimator`, which take them as well.

    Args:
        epochs: ``num_epoch``.
        optimizer: ``worker_optimizer``.
        verbose: 0 for ``Monitoring(progress=False)``, another number for ``progress=True``, "auto" for the default.
    """

    epochs: int
    optimizer: Any
    verbose: int | bool | str


#: Keras' names of arguments, by what they are called here.
_KERAS_NAMES = {"epochs": "num_epoch", "optimizer": "worker_optimizer"}
#: What Spark and dist-keras call an argument that has another name here, and slips that occur often.
_OTHER_NAMES = {
    "compile_loss": "loss",
    "epoch": "num_epoch",
    "workers": "num_workers",
    "inputCol": "features_col",
    "inputCols": "features_col",
    "outputCol": "prediction_col",
    "sample_weight": "sample_weight_col",
    "callback": "callbacks",
    "keras_model": "model",
}


def by_own_names(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with Keras' names replaced by those of `Trainer`.

    Raises:
        ConfigurationError: an argument has two names, or ``verbose`` is no number and not "auto".
    """
    own = {name: value for name, value in keywords.items() if name not in KerasNames.__annotations__}
    for name, value in keywords.items():
        argument = _KERAS_NAMES.get(name)
        if argument is not None:
            if own.get(argument) is not None:
                raise ConfigurationError(f"`{name}` and `{argument}` are the same argument. Received: both")
            own[argument] = value
    if (verbose := keywords.get("verbose", "auto")) != "auto":
        if not isinstance(verbose, int):
            raise invalid("verbose", verbose, '0, 1, 2 or "auto"')
        group = own.get("monitoring") or Monitoring()
        if group.progress is not None:
            raise ConfigurationError("`verbose` and `progress` of `monitoring` are the same argument. Received: both")
        own["monitoring"] = dataclasses.replace(group, progress=bool(verbose))
    return own


def unknown_keyword(keyword: str, value: Any, known: Iterable[str], owner: str) -> ConfigurationError:
    """Return the error for a keyword that ``owner`` does not have, with the one that was probably meant."""
    by_plain_name = {_plain(name): name for name in sorted(known)}
    likely = [by_plain_name.get(_plain(_OTHER_NAMES.get(keyword, keyword)), "")]
    likely += [by_plain_name[name] for name in difflib.get_close_matches(_plain(keyword), by_plain_name, n=1)]
    meant = next((f" Did you mean `{name}`?" for name in likely if name), f" See `help({owner})`.")
    return ConfigurationError(f"`{keyword}` must be a keyword of {owner}.{meant} Received: {keyword}={value!r}")


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def takes_keras_names(construct: Callable[_P, None]) -> Callable[_P, None]:
    """Have a constructor take `KerasNames` as well, and refuse unknown keywords with a suggestion."""
    own = [name for name, argument in inspect.signature(construct).parameters.items() if argument.kind is not _KEYWORDS]

    @functools.wraps(construct)
    def with_keras_names(*arguments: Any, **keywords: Any) -> None:
        keywords = by_own_names(keywords)
        for name, value in keywords.items():
            if name not in own:
                known = [*own[1:], *KerasNames.__annotations__]
                raise unknown_keyword(name, value, known, type(arguments[0]).__name__)
        return construct(*arguments, **keywords)

    return with_keras_names


_KEYWORDS = inspect.Parameter.VAR_KEYWORD


def arguments_of(kind: type) -> dict[str, inspect.Parameter]:
    """Return the arguments of the constructor of ``kind``, without `KerasNames`."""
    given = inspect.signature(kind).parameters
    return {name: argument for name, argument in given.items() if argument.kind is not _KEYWORDS}


def flattened(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `Trainer`'s arguments with its groups' options in their place; ConfigurationError if not a group."""
    options = {name: value for name, value in arguments.items() if name not in GROUPS}
    for name, kind in GROUPS.items():
        group = arguments.get(name)
        group = kind() if group is None else group
        if not isinstance(group, kind):
            raise invalid(name, group, f"a `distkeras.{kind.__name__}`, or None")
        options |= {field.name: getattr(group, field.name) for field in dataclasses.fields(kind)}
    return options


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `Trainer` that mean what the given ``options`` do, of its groups and its own."""
    arguments = dict(options)
    for name, kind in GROUPS.items():
        names = [field.name for field in dataclasses.fields(kind) if field.name in arguments]
        if names:
            arguments[name] = kind(**{field: arguments.pop(field) for field in names})
    return arguments


@dataclass(frozen=True)
class TrainSettings:
    """What acts on the data and on the driver; each field is the option of `Trainer` that has its name."""

    features_col: tuple[str, ...] | dict[str, str] = ("features",)
    label_col: Entries = ("label",)
    sample_weight_col: str | Entries | None = None
    class_weight: dict[int, float] | str | None = None
    decode: dict[str, Callable[[Any], Any]] | None = None
    padding: Padding | dict[str, Padding] | None = None
    num_workers: int | None = count(None)
    batch_size: int = count(DataSpec.batch_size)
    num_epoch: int = count(DataSpec.epochs)
    seed: int = count(DataSpec.seed, 0)
    shuffle: bool = flag(DataSpec.shuffle)
    partitioned_already: bool = flag(False)
    spool_bytes: int = count(Executors.spool_bytes, 0)
    max_skipped: int = count(ServerSettings.max_skipped, 0)
    progress: bool | None = flag(Monitoring.progress)
    log_every: float | None = positive(Monitoring.log_every)
    server: str = Network.server
    host: str | None = Network.host
    tls: bool = flag(Network.tls)
    stall_after: float | None = positive(Monitoring.stall_after)
    check_model: bool = flag(Monitoring.check_model)
    resources: Any = Executors.resources
    lends: bool | None = flag(Executors.lends)
    helpers: int = count(Executors.helpers, 0)
    frozen_weights: str | None = checked(None, require_place, "a path or a URI, or None")
    tables: str | tuple[str, ...] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        converted: dict[str, Any] = {
            "features_col": names_of(self.features_col, "features_col"),
            "label_col": entries_of(self.label_col, "label_col"),
            "sample_weight_col": _weight_entries(self.sample_weight_col),
            "class_weight": None if self.class_weight is None else require_class_weight(self.class_weight),
        }
        converted["padding"] = paddings_of(self.padding)
        if not self.shuffle and buckets(converted["padding"]):
            raise ConfigurationError("`Padding(bucket=True)` needs `shuffle`. Received: shuffle=False")
        converted["tables"] = _table_names(self.tables)
        converted["decode"] = decoders(self.decode, listed(converted["features_col"])) or None
        _require_place(self.server, self.host)
        _require_profile(self.resources)
        for name, value in converted.items():
            object.__setattr__(self, name, value)  # frozen from here on

    @property
    def data_arguments(self) -> dict[str, Any]:
        """The keywords of `data_spec`."""
        return {
            "features": self.features_col,
            "labels": self.label_col,
            "weight": self.sample_weight_col,
            "batch_size": self.batch_size,
            "epochs": self.num_epoch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "spool_bytes": self.spool_bytes,
            "decode": self.decode,
            "padding": self.padding,
        }

    @property
    def weight_columns(self) -> tuple[str, ...]:
        """The names of the columns of sample weights."""
        weight = self.sample_weight_col
        return (weight,) if isinstance(weight, str) else listed(weight or ())

    @property
    def class_weight_json(self) -> Any:
        """Return the weights of classes, JSON-ready."""
        weights = self.class_weight
        return {str(key): weight for key, weight in weights.items()} if isinstance(weights, dict) else weights

    @property
    def row_settings(self) -> dict[str, Any]:
        """What decides which rows a mini-batch has, JSON-ready; it must be the same for a job that is resumed."""
        decoded = {name: _qualified_name(function) for name, function in (self.decode or {}).items()}
        return {
            "features": _as_json(self.features_col),
            "labels": _as_json(self.label_col),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "sample_weight": _as_json(self.sample_weight_col),
            "class_weight": self.class_weight_json,
            "partitioned_already": self.partitioned_already,
            **({"decode": decoded} if decoded else {}),
            **({} if self.padding is None else {"padding": padding_json(self.padding)}),
        }


def _table_names(value: Any) -> str | tuple[str, ...]:
    """Return "auto", "dense", or the names of layers."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise invalid("tables", value, '"auto", "dense", or names of Embedding layers')
    return str(names[0]) if tuple(names) in (("auto",), ("dense",)) else tuple(names)


def _qualified_name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _weight_entries(value: Any) -> str | Entries | None:
    """Return one column of weights, which counts for all outputs, or an entry for each; None for no weights."""
    if isinstance(value, str) and value:
        return value
    return None if value is None else entries_of(value, "sample_weight_col") or None


def _as_json(columns: Any) -> Any:
    """Return columns with lists in place of tuples."""
    if isinstance(columns, dict):
        return {name: _as_json(entry) for name, entry in columns.items()}
    return list(map(_as_json, columns)) if isinstance(columns, tuple) else columns


@dataclass(frozen=True)
class JobFacts:
    """The facts about a job that are known before it starts, for its reports.

    Args:
        rule: the rule as Python source, with its hyper-parameters.
        workers: number of workers.
        helpers: number of helpers without rows, whose numbers follow those of the workers.
        rounds: whether the rule has rounds, in which workers wait for one another.
        saved: whether the server saves its state, that is, whether there is a checkpoint.
        options: hyper-parameters and options by dotted names, as `reported_options` returns them.
        stream: whether the job trains a stream, each of whose micro-batches has the epochs.
        model: the name of the Keras model; empty if it is unknown.
        parameters: number of its trainable parameters.
        columns: the columns of the DataFrame that the job reads, features first.
        monitor: the metric that a callback monitors; empty if there is none.
    """

    rule: str
    workers: int
    epochs: int
    batch_size: int = 0
    helpers: int = 0
    rounds: bool = False
    saved: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stream: bool = False
    model: str = ""
    parameters: int = 0
    columns: Sequence[str] = ()
    monitor: str = ""


def _require_place(server: str, host: str | None) -> None:
    require_choice("server", server, ("driver", "cluster"))
    if host is not None:
        require_text("host", host, "a host name or address, or None")
        if server == "cluster":
            raise invalid("host", host, "None with server='cluster': the server has that of the executor that runs it")


def _require_profile(value: Any) -> None:
    if value is None:
        return
    from pyspark.resource import ResourceProfile

    if not isinstance(value, ResourceProfile):
        raise invalid("resources", value, "a `pyspark.resource.ResourceProfile`, or None")


def default_rule(network: Network | None, *, has_tables: bool) -> Rule:
    """Return the rule of a trainer that names none.

    Args:
        has_tables: the model has an Embedding, whose rows may travel.
    """
    rounded = network is not None and network.wire_format != Network.wire_format
    return DEFAULT_RULE_FOR_ROWS if has_tables or rounded else DEFAULT_RULE


def rule_of(rule: Rule | str) -> Rule:
    """Return the rule; raise ConfigurationError if there is no such rule."""
    rule_object = make(rule) if isinstance(rule, str) else rule
    if not isinstance(rule_object, Rule):
        raise invalid("rule", rule, "a `Rule` or the name of one")
    return rule_object


def train_settings(arguments: Mapping[str, Any]) -> TrainSettings:
    """Return the settings of data and driver from `Trainer`'s keywords; ConfigurationError if one cannot work."""
    settings = TrainSettings(**_fields(TrainSettings, arguments))
    if settings.tls:
        make_certificate()  # finds out now whether it can
    return settings


def component_settings(kind: type[_S], rule: Rule, training: TrainSettings, arguments: Mapping[str, Any]) -> _S:
    """Return server's or workers' settings from `Trainer`'s keywords, while those that a job decides are unknown."""
    fields = _fields(kind, arguments) | {"rule": rule, "workers": training.num_workers or 1}
    for name in ("host", "tables", "lends"):
        fields.pop(name, None)
    return kind(**fields)


def reported_options(*settings: Any, compilation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that may matter to a job's outcome, in numbers, texts and None, by dotted names.

    Args:
        settings: instances of the classes of settings; those that come later win.
        compilation: of the model, as `Recipe.identity` has it.
    """
    options: dict[str, Any] = {"num_workers": None}
    for one in settings:
        for field in dataclasses.fields(one):
            if field.name not in _OPERATIONAL:
                options |= _flat(field.name, getattr(one, field.name))
    options["num_workers"] = options.pop("workers", options["num_workers"])
    for name, value in compilation.items():
        options |= _flat("worker_optimizer" if name == "optimizer" else name, value)
    return options


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Return a value by dotted names, an object of Keras by its class and settings, and nothing of other objects."""
    if isinstance(value, Rule):
        return {name: value.name} | _flat(name, value.config())
    if isinstance(value, Schedule):
        return {name: str(value)}
    if isinstance(value, Mapping) and "class_name" in value:
        return {name: value["class_name"]} | _flat(name, value.get("config"))
    if isinstance(value, Mapping):
        return {full: part for key, one in value.items() for full, part in _flat(f"{name}.{key}", one).items()}
    if isinstance(value, (list, tuple)):
        parts = [part.get("class_name") if isinstance(part, Mapping) else part for part in value]
        return {name: ", ".join(map(str, parts))} if all(isinstance(part, str) for part in parts) else {}
    return {name: value} if isinstance(value, (str, int, float)) else {}


def _fields(kind: type[_S], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are fields of ``kind``."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # every kind is a dataclass
    return {name: value for name, value in arguments.items() if name in names}


@dataclass(frozen=True)
class Option:
    """One argument of a constructor, or one field of a group of options.

    Args:
        annotation: its type, as it is written in Python.
        default: its default, `inspect.Parameter.empty` for none.
        text: what the docstring says of it, on one line and without markup.
    """

    name: str
    annotation: str
    default: Any
    text: str


def options_of(kind: type) -> dict[str, Option]:
    """Return the arguments of the constructor of ``kind`` by name, with the fields of a group in its place."""
    texts = texts_of_arguments(kind)
    options: dict[str, Option] = {}
    for name, parameter in arguments_of(kind).items():
        if name in GROUPS:
            options |= options_of(GROUPS[name])
        else:
            options[name] = Option(name, str(parameter.annotation), parameter.default, texts.get(name, ""))
    return options


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the default of each option of ``kind`` that has one."""
    options = options_of(kind).values()
    return {option.name: option.default for option in options if option.default is not inspect.Parameter.empty}


def texts_of_arguments(kind: type) -> dict[str, str]:
    """Return what the section "Args" of a docstring says of each argument, on one line and without markup."""
    section = (inspect.getdoc(kind) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    texts: dict[str, str] = {}
    for names, text in re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.M):
        texts |= dict.fromkeys(names.split(", "), " ".join(text.replace("`", "").split()))
    return texts
