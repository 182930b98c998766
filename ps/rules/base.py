"""The base of update rules: frozen hyper-parameters, and two halves of plain functions on explicit state.

The *worker half* runs with a `Replica`; it decides when an exchange is due, computes the payload, and processes the
reply. The *server half* runs under the center's lock: `accept` once per commit, then `apply` chunk by chunk.

Invariants, on which the center relies and which the conformance suite checks for every rule:

1. Vectors are flat and of one dtype (float32 on a server, float64 if a simulation uses it). Scalars are Python numbers,
   so that they never widen a vector.
2. A kernel (`apply`, `view`, `round_end`) is element-wise: it is called on consecutive chunks, and the result does
   not depend on where they are cut. A rule that needs a sum over the whole vector declares it by `Rule.reduces`.
3. A kernel writes ``chunk.out``, the model's and the worker's own vectors, ``chunk.payload`` and ``chunk.scratch``;
   never ``chunk.center`` or ``chunk.sent``. ``chunk.out`` may be the same memory as ``chunk.payload[0]`` or
   ``chunk.center``, so a kernel reads its inputs before it writes them. A `view` reads no payload, because it may
   follow `apply` on the same chunk and write into its payload.
4. A vector that was sent to a worker is immutable for both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from distkeras.ps.errors import ConfigurationError, LocalProtocolError
from distkeras.ps.validate import check_field, check_fields, invalid, require_integer

Vector = np.ndarray
Scalars = tuple[float, ...]

#: Elements of one chunk, and of one block of a reduction: 256 KB of float32 stay in a core's cache.
BLOCK = 64 * 1024
#: The largest number of batches of one call of `Rule.compute`, which a worker holds in memory at once.
CALL_STEPS_MAX = 64
#: The window that each worker chooses from the duration of its first exchanges or, under a rule that adds up the steps
#: of a window, that follows from the number of workers.
AUTO = "auto"
#: Steps of the longest window that a worker may choose.
WINDOW_MAX = 1000
#: Mini-batches that all workers together compute from one center, under a rule that adds up the steps of windows whose
#: length is "auto". The page on choosing a rule has the study that this number rests on.
IN_FLIGHT = 8
#: The window that the server chooses for each worker, in proportion to the worker's speed.
BY_SPEED = "by_speed"


@dataclass(frozen=True)
class Traits:
    """The traits of a rule that workers, server and simulator need to know.

    Args:
        parts: vectors in one payload.
        gradient: the payload is a raw gradient; the learning rate lives at the server.
        synchronous: commits add up to rounds, which a rendezvous of all workers ends.
        pull_first: a worker pulls right before it commits, and its commit is acknowledged without a vector.
        fixed_workers: the number of workers is part of the formula, so all must be running at once.
        keeps_replica: the worker keeps its own parameters and never copies the center (elastic rules).
        plain_sgd: the formula holds for plain SGD only; another worker optimizer is refused.
        keeps_sent: the server half reads what the committing worker was last sent.
        grows: the payload adds up the window's steps: a window twice as long takes a step twice as far.
        view: a worker is not sent the center itself, but a `Rule.view` of it.
        overlaps: a worker may compute its next window while a commit is in flight (`Rule.begin_overlapped_window`).
        rows: a commit may omit zeros from the payload, so that tables travel by the rows that a window touched. The
            server half moves each element only by its own payload, keeps no vector of its own, and does not change an
            element whose payload is zero, to the bit (except for the sign of a zero); the worker half computes a
            payload of zero for an element that has not moved. So an exchange by rows has the result of a dense one.
        sums: the sum of payloads that began from the same version of the center is a valid payload, and moves the
            center by the sum of the single movements. So the workers of a host may be a group, whose movements reach
            the server as one commit.
        peers: workers exchange with each other after each step (`worker.daso`), and commit at the end of an epoch;
            `simulation.simulate` cannot run the rule.
        model_vectors: names of the vectors that the server keeps in addition to the center.
        worker_vectors: names of the vectors that the server keeps for each worker.
        history: names of the vectors in `WorkerState.vectors` that a window takes over from the one before it, and that
            the server does not have. They travel with the state of the worker's optimizer.
    """

    parts: int = 1
    gradient: bool = False
    synchronous: bool = False
    pull_first: bool = False
    fixed_workers: bool = False
    keeps_replica: bool = False
    plain_sgd: bool = False
    keeps_sent: bool = False
    grows: bool = False
    view: bool = False
    overlaps: bool = False
    rows: bool = False
    sums: bool = False
    peers: bool = False
    model_vectors: tuple[str, ...] = ()
    worker_vectors: tuple[str, ...] = ()
    history: tuple[str, ...] = ()

    @property
    def lends(self) -> bool:
        """Whether any worker may train any mini-batch (`center.loans`): no half keeps anything for its partition."""
        bound = self.synchronous or self.fixed_workers or self.keeps_replica or self.peers
        return not (bound or self.history or self.worker_vectors)


@dataclass(frozen=True)
class RuleInfo:
    """The entry of a rule in the generated table of rules.

    Args:
        title: the name in the paper.
        paper: short citation.
        equations: where in the paper.
        bibtex: the paper's entry.
        sends: payload, in the notation of the docstrings. Default: the movement since the last pull.
        family: "delta", "elastic", "averaging", "gradient" or "peers".
    """

    title: str
    paper: str
    equations: str
    bibtex: str
    sends: str = "Δ = θᵏ − θ̃ sent"
    family: str = "delta"


class Context(NamedTuple):
    """The facts about a commit or a release that the server half of a rule may use.

    Args:
        workers: number of workers of the job, n.
        worker: the worker that commits or is sent the center.
        clock: commits applied before this one, c.
        staleness: commits applied since the clock at which the worker's window began, tau.
        steps: local steps of the payload.
        learning_rate: eta: the server's for gradient rules, else the worker optimizer's.
        previous_learning_rate: eta of the previous commit; the same unless a schedule has changed it.
        waiting: workers whose commits of the current round are applied, and that wait for its end.
    """

    workers: int
    worker: int
    clock: int
    staleness: int
    steps: int
    learning_rate: float
    previous_learning_rate: float
    waiting: int = 0

    @property
    def sent_clock(self) -> int:
        """Clock of the center that the worker was last sent, ite."""
        return self.clock - self.staleness


class Chunk:
    """The same slice of every vector that a kernel may use; one object is reused for all slices."""

    __slots__ = ("center", "model", "out", "payload", "scratch", "sent", "worker")

    out: Vector
    center: Vector
    payload: tuple[Vector, ...]
    model: tuple[Vector, ...]
    worker: tuple[Vector, ...]
    sent: Vector
    scratch: Vector


class BatchLike(Protocol):
    """A mini-batch, as the loop sees it; only the replica uses its arrays.

    It is number ``index`` of its ``epoch``, ``last`` if no other one follows there, and has ``size`` samples. The
    ``checksum`` is over all rows up to its last one.
    """

    @property
    def epoch(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def last(self) -> bool: ...
    @property
    def size(self) -> int: ...
    @property
    def checksum(self) -> int: ...


class Replica(Protocol):
    """A model on a worker, seen as one flat vector of ``size`` elements."""

    @property
    def size(self) -> int:
        """Elements of the vector."""

    @property
    def learning_rate(self) -> float:
        """The local optimizer's current learning rate, eta."""

    def load(self, vector: Vector) -> None:
        """Set the parameters; keep no reference to ``vector``."""

    def read(self, out: Vector) -> None:
        """Write the parameters into ``out``."""

    def moved(self, since: Vector, out: Vector) -> None:
        """Write the parameters minus ``since`` into ``out``, in one pass."""

    def train(self, batches: Sequence[Any]) -> np.ndarray:
        """Take one optimizer step per batch; return loss and metrics of each, float64 ``(len(batches), metrics)``."""

    def gradient(self, batch: Any, out: Vector) -> np.ndarray:
        """Write the gradient into ``out``, without a step; return loss and metrics, float64 ``(metrics,)``."""


@dataclass
class WorkerState:
    """The state of a worker between two exchanges.

    Args:
        sent: the vector that the server last sent; immutable.
        payload: the vectors of the next commit; new buffers at the start of each window.
        steps: local steps since the last exchange.
        window: steps of the present window, set by the server; 0: the rule's window.
        learning_rate: eta that the server last sent (gradient rules), else 0.
        previous_learning_rate: eta that the server sent before.
        used_learning_rate: eta at the latest step, as the server had sent it.
        due_early: set by a rule that ends the window before it is full.
        occupied: whether the server was applying commits of others at the last probe (`Rule.probes`); True at the
            start of each window.
        scale: mean scale factor that the worker half applied to the payload.
        vectors: the rule's own vectors.
    """

    sent: Vector
    payload: tuple[Vector, ...] = ()
    steps: int = 0
    window: int = 0
    learning_rate: float = 0.0
    previous_learning_rate: float = 0.0
    used_learning_rate: float = 0.0
    due_early: bool = False
    occupied: bool = True
    scale: float = 1.0
    vectors: dict[str, Vector] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """Base of all update rules. The defaults are accumulated DOWNPOUR: send the window's movement, add it.

    Args:
        window: local steps between two exchanges, lambda (communication window), at least 1; None for a whole epoch;
            "auto": each worker measures its first exchanges and chooses the smallest window that keeps communication
            within a tenth of its time or, where exchanges overlap with compute, that hides them; under a rule that adds
            up the steps of a window, eight divided by the number of workers, and at least 1; "by_speed": the
            server measures the workers and gives each a window in proportion to its speed, so that fast and slow ones
            commit equally often (dynamic local updates, Liu et al. 2024, Equation 6).
        window_max: H, the window of the fastest worker, at least 1; only with ``window="by_speed"``. Default: the
            rule's own default window.

    Raises:
        ConfigurationError: a hyper-parameter is invalid; "auto" or "by_speed" for a rule that runs in rounds, commits
            every gradient, or ends its windows itself.
    """

    name: ClassVar[str]
    info: ClassVar[RuleInfo]

    window: int | str | None = 1
    window_max: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.window, str):
            self._require_free_window()
        elif self.window is not None:
            check_field(self, "window", require_integer)
        if self.window_max is not None:
            if self.window != BY_SPEED:
                raise invalid("window_max", self.window_max, f"None unless `window` is {BY_SPEED!r}")
            check_field(self, "window_max", require_integer)

    def _require_free_window(self) -> None:
        """Raise ConfigurationError unless the rule allows windows that a worker or the server chooses."""
        if self.window not in (AUTO, BY_SPEED):
            raise invalid("window", self.window, f'a number of steps, "{AUTO}", "{BY_SPEED}", or None')
        traits = self.traits
        reasons = {
            "needs the same one at all workers": traits.synchronous,
            "commits every gradient": traits.gradient,
            "ends its windows itself": self.probes,
        }
        for reason, applies in reasons.items():
            if applies:
                raise invalid("window", self.window, f"a number: rule {self.name!r} {reason}")
        if self.window_by_speed == 1 and self.window_max is None:
            raise ConfigurationError(
                f"`window_max` must be given: rule {self.name!r} has no default window above 1 for the fastest worker. "
                f"Received: window={BY_SPEED!r}, window_max=None"
            )

    @property
    def traits(self) -> Traits:
        """The traits of the rule, which may depend on its hyper-parameters."""
        return Traits()

    @property
    def probes(self) -> bool:
        """Whether a worker asks if the server is occupied and calls `due` again: the rule ends its windows itself."""
        return self._overrides("due")

    @property
    def may_refuse(self) -> bool:
        """Whether commits may be refused by `refuses`, so that a worker computes the same window again."""
        return self._overrides("refuses")

    @property
    def reduces(self) -> bool:
        """Whether `apply` needs a sum over the whole vector first: `partial` and `reduced`."""
        return False

    @property
    def scales_elements(self) -> bool:
        """Whether `apply` scales each element by a factor of its own, so that their mean is known from all elements."""
        return False

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Rule, method)

    def reason_against_encoding(self, *, coarse: bool) -> str | None:
        """Return why vectors must not be rounded on the wire, with ``coarse`` to 8 bits; None: they may be."""
        if self.traits.keeps_replica:
            return "takes from a worker exactly what it gives to the center"
        if coarse and self.info.family == "averaging":
            return "sends parameters, whose small ones a coarse format loses"
        return None

    def for_workers(self, workers: int) -> Rule:
        """Return the rule with the window that "auto" stands for, where that follows from the number of workers."""
        if self.window != AUTO or not self.traits.grows:
            return self
        return replace(self, window=max(1, IN_FLIGHT // workers))

    @property
    def window_by_speed(self) -> int | None:
        """The window of the fastest worker, H, if windows follow the workers' speeds; else None."""
        if self.window != BY_SPEED:
            return None
        default = type(self).window
        return self.window_max or (default if isinstance(default, int) else 1)

    @property
    def _steps(self) -> int:
        """The window in steps; a worker that chooses its window replaces "auto" by a number."""
        steps = self.window_by_speed or self.window
        if not isinstance(steps, int):
            raise LocalProtocolError(f"a worker's rule must have a window in steps. Received: window={self.window!r}")
        return steps

    def start(self, replica: Replica, sent: Vector) -> WorkerState:
        """Return the state of a worker that begins from the center ``sent``, which it has pulled."""
        replica.load(sent)
        return WorkerState(sent=sent)

    def continue_from(
        self, replica: Replica, state: WorkerState, history: Sequence[Vector], learning_rate: float
    ) -> None:
        """Continue from the ``history`` of an earlier attempt, right after `start`; for ``Traits.history``.

        Args:
            history: the vectors that the trait names, in its order.
            learning_rate: eta at the latest step of the earlier attempt, as the server had sent it.
        """
        state.vectors.update(zip(self.traits.history, history, strict=True))
        state.previous_learning_rate = learning_rate

    def steps_until_due(self, state: WorkerState) -> int:
        """Return the number of steps that may be taken before `due` must be called again."""
        if self.window is None:
            return CALL_STEPS_MAX
        return min((state.window or self._steps) - state.steps, CALL_STEPS_MAX)

    def compute(self, replica: Replica, state: WorkerState, batches: Sequence[Any]) -> np.ndarray:
        """Take ``len(batches)`` local steps; return loss and metrics of each, as `Replica.train` does."""
        return replica.train(batches)

    def due(self, state: WorkerState) -> bool:
        """Return whether an exchange is due now; it is always due at the end of an epoch."""
        return state.due_early or (self.window is not None and state.steps >= (state.window or self._steps))

    def elastic_exchange(self, replica: Replica, state: WorkerState, center: Vector) -> None:
        """Fill ``state.payload`` from the ``center`` just pulled, and move the replica; for ``Traits.pull_first``."""
        raise NotImplementedError

    def fill_payload(self, replica: Replica, state: WorkerState) -> None:
        """Fill ``state.payload``; for all rules without ``Traits.pull_first``."""
        replica.moved(state.sent, state.payload[0])

    def share_sent(self, steps: int) -> float:
        """Return the share of a window's movement that its payload has, if the window has ``steps`` steps."""
        return 1.0

    def receive(self, replica: Replica, state: WorkerState, sent: Vector) -> None:
        """Begin the next window from ``sent``, the reply to a commit."""
        replica.load(sent)
        state.sent = sent

    def begin_overlapped_window(self, replica: Replica, state: WorkerState, sent: Vector) -> None:
        """Begin the next window while ``state.payload`` is in flight; for ``Traits.overlaps``.

        ``sent`` is the reply to the previous commit (at first, the pulled center), and does not contain this payload.
        So the window begins from their sum, the center if no other worker commits, and its movement is measured from
        there.
        """
        begun = state.vectors.get("begun")
        if begun is None:
            begun = state.vectors["begun"] = np.empty_like(sent)
        np.add(sent, state.payload[0], out=begun)
        replica.load(begun)
        state.sent = begun

    def refuses(self, context: Context, refusals: int) -> bool:
        """Return whether to refuse a commit, before anything is changed.

        Args:
            context: of the commit.
            refusals: how many times in a row the worker's window was refused before.
        """
        return False

    def accept(self, context: Context, counters: dict[str, int]) -> Scalars:
        """Return the scalars for `apply`; called once per commit, in clock order.

        ``counters`` is the rule's state: snapshots contain it, and another number of workers begins without it.
        """
        return ()

    def partial(self, chunk: Chunk, scalars: Scalars) -> float:
        """Return this block's share of the sum, in float64; for `reduces`."""
        raise NotImplementedError

    def reduced(self, scalars: Scalars, total: float) -> Scalars:
        """Return the scalars for `apply`, from the ``total`` over all blocks; for `reduces`."""
        raise NotImplementedError

    def apply(self, chunk: Chunk, scalars: Scalars) -> float | None:
        """Apply one chunk of the commit; return the sum of the scale factors, or None if each was 1.

        The default adds the payload, times the scale factor that `accept` has returned, if any.
        """
        (scale,) = scalars or (1,)
        delta = chunk.payload[0]
        if scale != 1:
            delta *= scale
        np.add(chunk.center, delta, out=chunk.out)
        return scale * delta.size if scalars else None

    def release(self, context: Context, counters: dict[str, int]) -> Scalars:
        """Return the scalars for `view` and `round_end`."""
        return ()

    def view(self, chunk: Chunk, scalars: Scalars) -> None:
        """Write one chunk of the vector that the worker is sent into ``chunk.out``; for ``Traits.view``."""
        raise NotImplementedError

    def round_end(self, chunk: Chunk, contributions: int, scalars: Scalars) -> None:
        """Apply one chunk of the step that ends a round, whose sum is in ``payload[0]``; for ``Traits.synchronous``."""
        raise NotImplementedError

    def buffered(self, counters: dict[str, int]) -> int:
        """Return the number of commits that the center does not contain yet: buffered movements."""
        return 0

    def begin_drain(self, workers: int, counters: dict[str, int]) -> Scalars | None:
        """Reset ``counters``, and return the scalars for `drain`; None: nothing is buffered."""
        return None

    def drain(self, chunk: Chunk, scalars: Scalars) -> None:
        """Apply one chunk of the step with the buffered commits; there is no payload."""
        raise NotImplementedError

    def leave(self, model: tuple[Vector, ...], worker: tuple[Vector, ...], counters: dict[str, int]) -> None:
        """Note in the model's vectors and ``counters`` that a worker has left; ``worker`` are its vectors.

        It changes nothing that the rule needs if the worker returns, when its job is resumed with more epochs.
        """

    def return_all(self, model: tuple[Vector, ...], counters: dict[str, int]) -> None:
        """Undo `leave` of all workers, to the bit."""

    def require_job(self, workers: int, epochs: int) -> None:
        """Raise ConfigurationError if the rule cannot train with so many workers and epochs."""

    def config(self) -> dict[str, Any]:
        """Return the hyper-parameters by name, JSON-ready; `window_max` only if it is set."""
        values = dataclasses.asdict(self)
        if self.window_max is None:
            del values["window_max"]
        return values

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.config().items())})"


def sum_of_squares(vector: Vector) -> float:
    """Return the squared Euclidean norm, summed in float64 over blocks of `BLOCK` elements; the same on both sides."""
    total = 0.0
    for start in range(0, vector.size, BLOCK):
        total += float(np.square(vector[start : start + BLOCK], dtype=np.float64).sum())
    return total


def total_of(vectors: Sequence[Vector], out: Vector | None = None) -> Vector:
    """Return the sum of one or more vectors, added in their order.

    Args:
        out: memory for the sum, different from that of the vectors; None: new memory.
    """
    first, *others = vectors
    out = np.empty_like(first) if out is None else out
    if not others:
        out[...] = first
        return out
    np.add(first, others[0], out=out)
    for vector in others[1:]:
        out += vector
    return out


def all_finite(vector: Vector) -> bool:
    """Return whether there is no NaN or infinity in ``vector``."""
    with np.errstate(over="ignore", invalid="ignore"):  # the dot product may overflow: then each number is checked
        finite = bool(np.isfinite(np.dot(vector, vector)))
    return finite or bool(np.isfinite(vector).all())


#: Why a rule that compares the center with what a worker was sent cannot have that rounded.
READS_SENT = "reads exactly what a worker was sent"

THESIS = {
    "paper": "Hermans 2017",
    "bibtex": """\
@mastersthesis{hermans2017,
  author = {Hermans, Joeri},
  title  = {On Scalable Deep Learning and Parallelizing Gradient Descent},
  school = {Maastricht University},
  year   = {2017},
}""",
}

DANA = {
    "paper": "Hakimi et al. 2019",
    "bibtex": """\
@article{hakimi2019,
  author  = {Hakimi, Ido and Barkai, Saar and Gabel, Moshe and Schuster, Assaf},
  title   = {Taming Momentum in a Distributed Asynchronous Environment},
  journal = {arXiv preprint arXiv:1907.11612},
  year    = {2019},
}""",
}

ORMO = {
    "paper": "Shi et al. 2024",
    "bibtex": """\
@inproceedings{shi2024,
  author    = {Shi, Chang-Wei and Yang, Yi-Rui and Li, Wu-Jun},
  title     = {Ordered Momentum for Asynchronous {SGD}},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
}""",
}

DELAY_COMPENSATION = {
    "paper": "Zheng et al. 2017",
    "bibtex": """\
@inproceedings{zheng2017,
  author    = {Zheng, Shuxin and Meng, Qi and Wang, Taifeng and Chen, Wei and others},
  title     = {Asynchronous Stochastic Gradient Descent with Delay Compensation},
  booktitle = {International Conference on Machine Learning},
  year      = {2017},
}""",
}

ASYNC_LOCAL_SGD = {
    "paper": "Liu et al. 2024",
    "bibtex": """\
@article{liu2024,
  author  = {Liu, Bo and Chhaparia, Rachita and Douillard, Arthur and Kale, Satyen and others},
  title   = {Asynchronous Local-{SGD} Training for Language Modeling},
  journal = {arXiv preprint arXiv:2401.09135},
  year    = {2024},
}""",
}
