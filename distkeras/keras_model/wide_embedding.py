"""A layer whose table no process holds: see `distkeras.layers`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from distkeras.keras_model.model_graph import require_exact_ids
from distkeras.keras_model.stored_rows import (
    SavedRows,
    StoredRows,
    following,
    in_unnamed_file,
    listed_files,
    sorted_rows,
)
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.tables import Ids, TableShape
from distkeras.ps.validate import require_integer, require_number
from distkeras.ps.world.files import require_place

_OF_64_BITS = ("int64", "uint64")


@keras.saving.register_keras_serializable("distkeras")
class WideEmbedding(keras.layers.Layer):  # type: ignore[misc]  # Keras' classes have no types
    """Turn ids into vectors, as `keras.layers.Embedding` does, with a table of more rows than a machine can hold.

    ::

        user = keras.Input((1,), dtype="int64")
        vector = WideEmbedding(2**40, 32, folder="/models/users", name="users")(user)

    A `distkeras.Trainer` trains it by rows: the parameter server keeps the rows that were touched, and a worker keeps
    those of its window. The trained model refers to these rows in a new folder within ``folder``: Parquet files with
    the columns ``id`` and ``vector``. All other rows keep their initial values: numbers between minus ``scale`` and
    ``scale``, uniformly distributed, which depend only on ``seed``, the row and the column.

    The layer has no weights. It predicts in any process that can reach its folder; on JAX, only without compilation.
    Keras' own ``fit`` cannot train it. If the trained rows are gone, incomplete or changed, predicting, evaluating and
    training raise a ConfigurationError.

    Args:
        input_dim: number of rows, at most 2**63 - 1; ids are from 0 on.
        output_dim: elements of a vector.
        folder: a folder, or a URI that Arrow's filesystems open, which the driver can write to.
        scale: bound of the numbers in rows that no commit has moved; 0: these rows are zero.
        seed: seed of these rows.
        admit_after: touches from which on a row is trained and kept; before that it has its initial value. A touch is a
            commit that names the row: a window of a worker in which a mini-batch has it. Default: 1, all rows.
        expire_after_commits: commits, of all workers, without a touch after which a row is forgotten: it has its
            initial value again, and a touch of it is its first one. None: rows are kept.
        expire_after_seconds: seconds without a touch after which this happens, by the times of commits, to within a
            thousandth of that time.
        rows: the folder with the trained rows, or a version's list of their files, which training sets; None: there
            are none. After the folder was moved, set the attribute to its new place.
        rows_checksum: of the list of that folder's files, which training sets.

    Raises:
        ConfigurationError: An argument is invalid, or ids have a dtype that rounds them.
    """

    #: Marks a layer without weights of its own, whose rows a server keeps.
    keeps_rows_at_server = True

    def __init__(  # noqa: PLR0913 - independent facts of one table, which callers name
        self,
        input_dim: int,
        output_dim: int,
        folder: str,
        scale: float = 0.05,
        seed: int = 0,
        admit_after: int = 1,
        expire_after_commits: int | None = None,
        expire_after_seconds: float | None = None,
        rows: str | None = None,
        rows_checksum: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**{"autocast": False} | options)  # half precision would round ids
        self.input_dim = require_integer("input_dim", input_dim, 1, (1 << 63) - 1)
        self.output_dim = require_integer("output_dim", output_dim)
        self.folder = require_place("folder", folder, "a folder for the rows that are trained")
        self.scale = float(require_number("scale", scale, inclusive=True))
        self.seed = require_integer("seed", seed, 0, (1 << 63) - 1)
        self.admit_after = require_integer("admit_after", admit_after)
        self.expire_after_commits = expire_after_commits
        if expire_after_commits is not None:
            self.expire_after_commits = require_integer("expire_after_commits", expire_after_commits)
        self.expire_after_seconds = expire_after_seconds
        if expire_after_seconds is not None:
            self.expire_after_seconds = float(require_number("expire_after_seconds", expire_after_seconds))
        self.rows = None if rows is None else require_place("rows", rows, "a folder with rows, or None")
        self.rows_checksum = rows_checksum
        self.supports_jit = False  # rows are looked up outside of compiled code
        #: The rows that were looked up last, where they are saved, and the entries of their files.
        self._stored: tuple[SavedRows | None, list[dict[str, Any]], StoredRows] | None = None
        self._lent: tuple[Ids, np.ndarray] | None = None
        self._takes_64_bits = False

    @property
    def saved_rows(self) -> SavedRows | None:
        """Return where the trained rows are; None: there are none."""
        return None if self.rows is None else SavedRows(self.rows, self.rows_checksum)

    def table(self, most: int = 1) -> TableShape:
        """Return the shape of the table; ``most`` is the number of rows that a window can touch."""
        lives = (self.admit_after, self.expire_after_commits or 0, self.expire_after_seconds or 0.0)
        return TableShape(self.name, self.input_dim, self.output_dim, most, self.seed, self.scale, *lives)

    def call(self, ids: Any, training: bool = False) -> Any:
        """Return the vectors of ``ids``, with one more axis.

        Raises:
            ConfigurationError: ``training`` is set, outside of a `Trainer`, or the trained rows are not those that
                training has written.
            BadValueError: an id is not a row.
        """
        if training:
            raise ConfigurationError(
                f"the table of {self.name!r} must be trained by `distkeras.Trainer`, which moves its rows. "
                "Received: a training step of Keras"
            )
        if self._lent is None:
            self._require_whole(ids)
            self.open_rows()  # an error within TensorFlow's function would lose its type
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            rows = tf.numpy_function(self._take, [ids], tf.float32)
            rows.set_shape((*ids.shape, self.output_dim))
        else:
            rows = keras.ops.convert_to_tensor(self._take(keras.ops.convert_to_numpy(ids)))
        return keras.ops.cast(rows, self.compute_dtype)

    def compute_output_spec(self, ids: Any, training: bool = False) -> Any:
        """Return the shape and dtype of the vectors of ``ids``; ConfigurationError if their dtype rounds some ids."""
        dtype = keras.backend.standardize_dtype(ids.dtype)
        require_exact_ids(self.name, self.input_dim, dtype)
        self._takes_64_bits = self._takes_64_bits or dtype in _OF_64_BITS
        return keras.KerasTensor((*ids.shape, self.output_dim), self.compute_dtype)

    def _require_whole(self, ids: Any) -> None:
        """Raise ConfigurationError if the backend has cut ids of 64 bits short: they would be those of other rows."""
        dtype = keras.backend.standardize_dtype(ids.dtype)
        if self._takes_64_bits and self.input_dim > 2**31 and dtype not in _OF_64_BITS:
            raise ConfigurationError(
                f"ids of {self.name!r} must be integers of 64 bits, as its input says; JAX has them if "
                f"`JAX_ENABLE_X64=1` is in the environment. Received: ids of {dtype} for {self.input_dim} rows"
            )

    def lend(self, ids: Ids, rows: np.ndarray) -> None:
        """Make this layer look up only ``rows``, float32 ``(ids, width)``, of ascending ``ids``."""
        self._lent = ids, rows

    def _take(self, ids: Any) -> np.ndarray:
        if self._lent is not None:
            return self._take_lent(np.asarray(ids).astype(np.int64, copy=False))
        return self.open_rows().take(np.asarray(ids))

    def open_rows(self) -> StoredRows:
        """Return the trained rows; of a version that goes on from the last one, read only what has changed.

        Raises:
            ConfigurationError: they are not those that training has written.
        """
        saved = self.saved_rows
        if self._stored is None or self._stored[0] != saved:
            shape = self.table()
            listed, stored = listed_files(saved, shape), None
            if self._stored is not None and saved is not None:
                stored = following(self._stored[2], self._stored[1], saved, shape)
            if stored is None:
                stored = StoredRows(shape, *sorted_rows(saved, shape, in_unnamed_file))
            self._stored = saved, listed, stored
        return self._stored[2]

    def _take_lent(self, wanted: np.ndarray) -> np.ndarray:
        assert self._lent is not None, "the caller has checked"
        ids, rows = self._lent
        places = np.searchsorted(ids, wanted)
        known = places < len(ids)
        known[known] = ids[places[known]] == wanted[known]
        if not known.all():
            raise ConfigurationError(
                "a model with a WideEmbedding must be evaluated on rows that `TrainingSetup.read_rows` has returned, "
                f"whose ids come with the center. Received: id {wanted[~known][0]} of {self.name!r}"
            )
        taken: np.ndarray = rows[places]
        return taken

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        names = ("input_dim", "output_dim", "folder", "scale", "seed", "rows", "rows_checksum")
        lives = {"admit_after": 1, "expire_after_commits": None, "expire_after_seconds": None}
        given = [name for name, default in lives.items() if getattr(self, name) != default]
        return {**super().get_config(), **{name: getattr(self, name) for name in (*names, *given)}}
