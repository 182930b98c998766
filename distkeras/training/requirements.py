"""The checks that a job can work, before any of it starts; each raises a ConfigurationError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import Batch, DataSpec
from distkeras.keras_model.optimizers import inner_optimizer, takes_plain_steps
from distkeras.keras_model.replica import KerasReplica
from distkeras.private_keras import rate_of
from distkeras.ps.center.schedulers import scheduler_for
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError, DistkerasError
from distkeras.ps.rules import Rule
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.transport.row_links import KINDS
from distkeras.ps.validate import reason_against, refuse
from distkeras.settings import TrainSettings
from distkeras.spark.cluster import SparkFacts

if TYPE_CHECKING:
    import keras
    from pyspark.resource import ResourceProfile

#: Bytes for the names of a model's arrays, in addition to the model.
_FRAME_ROOM = 1 << 20


def require_fit(replica: KerasReplica, batch: Batch, received: Sequence[object]) -> None:
    """Try the model, its loss and its metrics on a mini-batch of the data's shapes and dtypes."""
    try:
        replica.prepare(batch)
    except DistkerasError:
        raise
    except Exception as error:  # backends, losses and metrics raise errors of any class
        raise ConfigurationError(
            "`model` must have inputs, loss and metrics that fit the data. "
            f"Received: {', '.join(map(str, received))}: {type(error).__name__}: {error}"
        ) from error


def require_size(server: ServerSettings, size: int, sent_file: bytes) -> None:
    """Raise ConfigurationError unless a server, which is not started yet, accepts a model of ``size`` elements."""
    nbytes = len(sent_file) + 4 * size
    most = server.max_body - _FRAME_ROOM
    if nbytes > most:
        raise ConfigurationError(
            f"`model` must have at most {most >> 20} MiB, trainable weights counted twice. Executors can read large "
            f"frozen weights from a file: see `frozen_weights`. Received: {-(-nbytes >> 20)} MiB"
        )


def require_finite(replica: KerasReplica) -> None:
    """Raise ConfigurationError unless the model's weights are finite, so that no worker is blamed for them later."""
    import keras

    # An infinity in a weight that is not trained may be intended, such as a mask's.
    published = {*replica.layout.names, *replica.moving_statistics.names}
    for variable in replica.model.weights:
        if not keras.backend.is_float_dtype(variable.dtype):
            continue
        with np.errstate(over="ignore"):  # a value too large for float32 is not finite either
            value = np.asarray(keras.ops.convert_to_numpy(variable)).astype(np.float32).ravel()
        bad = np.flatnonzero(~np.isfinite(value) if variable.path in published else np.isnan(value))
        if bad.size:
            raise ConfigurationError(
                f"`model` must have finite weights. Received: {value[bad[0]]} in element {bad[0]} of "
                f"{variable.path!r} ({bad.size} such)"
            )


def require_optimizer(rule: Rule, model: keras.Model) -> None:
    """Raise ConfigurationError unless the rule works with the workers' optimizer and with constraints of weights."""
    traits, optimizer = rule.traits, model.optimizer
    if not (traits.plain_sgd or traits.gradient):
        return
    why = "takes its steps at the server" if traits.gradient else "needs the plain step"
    if not takes_plain_steps(optimizer):
        raise ConfigurationError(
            "`worker_optimizer` must be SGD without momentum, weight decay, accumulation or steps of its own: "
            f"rule {rule.name!r} {why}. "
            f"Received: worker_optimizer={optimizer.name!r} with {optimizer.get_config()}"
        )
    bound = [variable for variable in model.trainable_variables if variable.constraint is not None]
    if bound:
        raise ConfigurationError(
            f"`model` must have no constraints of trainable weights: rule {rule.name!r} {why}, after which nothing "
            "applies them. Take a rule whose workers take steps of their optimizers, such as 'downpour' or 'dynsgd'. "
            f"Received: {bound[0].path!r} with {type(bound[0].constraint).__name__}"
        )


def require_constant_rate(rule: Rule, optimizer: Any) -> None:
    """Raise ConfigurationError if the server would take the rate of an optimizer with a schedule for a constant."""
    import keras

    rate = rate_of(inner_optimizer(optimizer))
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) or callable(rate):
        raise ConfigurationError(
            f"`worker_optimizer` must have a number as its learning rate: rule {rule.name!r} takes its steps at the "
            "server. Give `learning_rate` one of `distkeras.schedules`, which run over the server's commits. "
            f"Received: learning_rate={type(rate).__name__}"
        )


def require_shared(checkpoint: Checkpoint | None) -> None:
    """Raise ConfigurationError without a folder in which executors can read the address of a server in the cluster."""
    if checkpoint is None:
        raise ConfigurationError(
            "`checkpoint` must be a folder that every executor reaches, with server='cluster': the server says there "
            "where it is. Received: None"
        )


def require_slots(
    server: ServerSettings,
    facts: SparkFacts,
    known: Mapping[str, int],
    resources: ResourceProfile | None,
    *,
    apart: int,
) -> None:
    """Check that Spark can run all workers at once if the rule or the bound needs it, as far as that is known.

    ``known`` is how many tasks Spark runs at once by each resource; ``apart``: the number of slots that the server
    takes.
    """
    if resources is not None:
        _require_known(resources, facts)
    at_once = min(known.values(), default=None)
    if at_once is None or at_once >= server.workers + apart:
        return
    slots = at_once - apart
    where = f"spark.master={facts.master}"
    if len(known) > 1:
        where += f", slots by resource: {', '.join(f'{name} {number}' for name, number in known.items())}"
    if not at_once:
        raise ConfigurationError(
            f"an executor must have what a worker's task takes. Received: no room for a task ({where})"
        )
    if slots < 1:
        raise ConfigurationError(
            f"`server='cluster'` needs {'a slot' if apart == 1 else f'{apart} slots'} for the server"
            f"{' and its shards' * (apart > 1)} and one for a worker at least. Received: {at_once} at once ({where})"
        )
    if scheduler_for(server.rule, server.workers, server.staleness_bound, gather=server.relays is not None).gather:
        needs = f"rule {server.rule.name!r}" if server.staleness_bound is None else "`staleness_bound`"
        needs = needs if server.relays is None else "`relays`"
        raise ConfigurationError(
            f"`num_workers` must be at most {slots}, which is how many tasks Spark runs at once"
            f"{' next to the server' if apart else ''} "
            f"({where}): {needs} needs all workers at the same time. "
            f"Received: num_workers={server.workers}"
        )


def require_together(server: ServerSettings, training: TrainSettings, *, stream: bool) -> None:
    """Raise ConfigurationError if workers that exchange with each other cannot do so under a job's options."""
    if server.relays is not None:
        if isinstance(server.relays, int) and server.relays > server.workers:
            raise ConfigurationError(
                f"`relays` must be at most `num_workers`, {server.workers}. Received: relays={server.relays}"
            )
        refuse("relays", server, training, stream=stream)
    if server.shards > 1:
        refuse("shards", server, training, stream=stream)
    server.rule.require_job(server.workers, training.num_epoch)
    if server.rule.traits.peers:
        refuse("a rule whose workers exchange", server, training, stream=stream)


def may_lend(
    server: ServerSettings, worker: WorkerSettings, training: TrainSettings, spec: DataSpec, *, stream: bool
) -> bool:
    """Return whether workers train mini-batches of others: as the user says, or else if the job allows it.

    Raises:
        ConfigurationError: they must, but the rule, an option or a column does not allow it.
    """
    must = bool(training.lends or training.helpers)
    if training.helpers and training.lends is False:
        raise ConfigurationError(
            f"`helpers` must be 0 if workers do not lend. Received: helpers={training.helpers}, lends=False"
        )
    keeps_rows = spec.epochs > 1 or spec.rewindable
    if training.lends is False or not (must or (server.workers > 1 and keeps_rows)):
        return False
    reason = _reason_against_lending(server, worker, training, spec, stream=stream)
    if reason is not None and must:
        raise ConfigurationError(reason)
    return reason is None


def _reason_against_lending(
    server: ServerSettings, worker: WorkerSettings, training: TrainSettings, spec: DataSpec, *, stream: bool
) -> str | None:
    if not server.rule.traits.lends:
        return (
            f"`lends` must be False with rule {server.rule.name!r}: what a worker trains depends on its own earlier "
            "steps, or on which workers train. Received: lends=True"
        )
    for column in spec.columns:
        if np.dtype(column.dtype).kind not in KINDS:
            return f"`lends` must be False with column {column.name!r}, which has no numbers. Received: lends=True"
    return reason_against("lending", server, worker, training, stream=stream)


def _require_known(resources: ResourceProfile, facts: SparkFacts) -> None:
    """Raise ConfigurationError unless Spark schedules by ``resources``; under Connect, register them."""
    if facts.local:
        raise ConfigurationError(
            "`resources` must be None on a local master: Spark schedules stages by their resources on a standalone "
            f"master, YARN and Kubernetes. Received: spark.master={facts.master}"
        )
    if not facts.connect:
        return
    try:
        _ = resources.id  # the server assigns it
    except RuntimeError as error:
        raise ConfigurationError(
            "`resources` must be known to Spark Connect: ask for its `id` in the thread that made the session, before "
            f"another one trains. Received: {error}"
        ) from error
