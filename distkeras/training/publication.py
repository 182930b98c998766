"""What a job publishes: the model, its weights and its tables, as the server and the workers receive them."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from distkeras.keras_model.stored_rows import load_rows
from distkeras.keras_model.weights_file import without_weights_of
from distkeras.ps.checkpoint.checkpointer import StartMode
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.framing import KEY_BYTES, encode
from distkeras.ps.protocol.layout import Layout
from distkeras.ps.protocol.messages import Ack
from distkeras.ps.server.process import StartRequest
from distkeras.ps.transport.client import make_certificate
from distkeras.ps.transport.driver_client import DriverClient, publication
from distkeras.training.plan import JobPlan
from distkeras.training.requirements import require_size
from distkeras.training.server_task import ServerTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distkeras.keras_model.stored_rows import SavedRows
    from distkeras.ps.protocol.tables import TableShape


class Publication:
    """The state from which a job begins, as it is when this object is made.

    Args:
        plan: of the job.

    Raises:
        ConfigurationError: the model is too large for a server, or the file of its frozen weights cannot be read.
    """

    def __init__(self, plan: JobPlan) -> None:
        replica, whole = plan.replica, plan.cut.whole
        self._plan, file = plan, _sent_file(plan)
        require_size(plan.server, plan.dense_size + replica.moving_statistics.size, file)
        start, moving_statistics = replica.layout.empty(), replica.moving_statistics.empty()
        replica.read(start)
        replica.read_moving_statistics(moving_statistics)
        names, shapes = replica.layout.names, replica.layout.shapes
        dense = Layout(names[: len(names) - len(whole)], shapes[: len(shapes) - len(whole)])
        layouts = (dense, replica.moving_statistics)
        self._message = publication(start[: plan.dense_size], moving_statistics, file, layouts)
        #: Each table that travels by rows, and its part of the weights, ``(rows, width)``.
        self._tables = list(zip(whole, replica.layout.views(start)[len(dense.names) :], strict=True))

    def send(self, driver: DriverClient) -> None:
        """Publish to a server; any number of times, such as after a restart."""
        driver.publish_rows(self._tables)
        for number, table, saved in self._trained_rows():
            driver.publish_touched(number, table, load_rows(saved, table))
        driver.request(self._message, Ack)

    def server_task(self) -> ServerTask:
        """Return the server as a task in the cluster, with a fresh random key.

        Raises:
            ConfigurationError: a table continues from trained rows, which only the driver sends.
        """
        plan, trained = self._plan, next(self._trained_rows(), None)
        if trained is not None:
            raise ConfigurationError(
                f"`server` must be 'driver' if a WideEmbedding continues from trained rows, as "
                f"{trained[1].name!r} does: the driver sends them. Received: server='cluster'"
            )
        request = StartRequest(
            settings=plan.server,
            key=secrets.token_bytes(KEY_BYTES),
            certificate=make_certificate() if plan.training.tls else None,
            mode=StartMode(fresh=not plan.resume, same_attempts=False, epochs=plan.training.num_epoch),
            job=plan.identity(),
        )
        frame = b"".join(encode(self._message))
        return ServerTask(request, frame, self._tables, driver=plan.facts.driver_address)

    def _trained_rows(self) -> Iterator[tuple[int, TableShape, SavedRows]]:
        """Yield the tables that continue from trained rows, and where these are."""
        for number, table in self._plan.cut.partial:
            saved = self._plan.replica.model.get_layer(table.name).saved_rows
            if saved is not None:
                yield number, table, saved


def _sent_file(plan: JobPlan) -> bytes:
    """Return the model file that workers are sent, without weights that they read from another file."""
    if plan.cut.tables:
        return plan.cut.model_file
    uri = plan.training.frozen_weights
    return plan.model_file if uri is None else without_weights_of(plan.model_file, uri)
