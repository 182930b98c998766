"""Faults in the states of the workers' optimizers."""

from __future__ import annotations

from mutants.mutant import Mutant

_KEEPER, _REQUESTS = "ps/worker/optimizer_keeper.py", "ps/server/requests.py"
_FILES, _STATE = "ps/checkpoint/checkpointer.py", "distkeras/keras_model/replica.py"
_AT_SERVER = ("tests/ps/server/test_optimizer_states.py",)
_IN_FILES = ("tests/ps/checkpoint/test_optimizer_files.py",)

OPTIMIZERS = (
    Mutant(
        "a state of another commit is kept",
        "ps/center/leases.py",
        "if message.sequence != sequence or not sequence:",
        "if not sequence:",
        "a successor begins with steps that do not count",
        _AT_SERVER,
    ),
    Mutant(
        "an incomplete state is kept",
        _REQUESTS,
        "if message.damaged:",
        "if False:",
        "an incomplete state replaces a complete one",
        _AT_SERVER,
    ),
    Mutant(
        "a skipped commit leaves the state",
        "ps/center/center.py",
        "lease.optimizer = None  # the",
        "pass  # the",
        "what led to a NaN is loaded again",
        _AT_SERVER,
    ),
    Mutant(
        "one slow state counts for all",
        _KEEPER,
        "statistics.median_low(self._took)",
        "max(self._took)",
        "after a short standstill of the network no state is sent for long",
        ("tests/ps/worker/test_optimizer_keeper.py",),
    ),
    Mutant(
        "a worker's momentum begins with zeros in a resumed job",
        "ps/rules/base.py",
        "        state.vectors.update(zip(self.traits.history, history, strict=True))\n",
        "",
        "a resumed job trains with other weights than an uninterrupted one",
        ("tests/ps/checkpoint/test_resumed_rules.py",),
    ),
    Mutant(
        "the rate in a saved momentum is forgotten",
        "ps/rules/base.py",
        "        state.previous_learning_rate = learning_rate\n",
        "",
        "a momentum is not corrected for a rate that a schedule has changed",
        ("tests/ps/checkpoint/test_resumed_rules.py",),
    ),
    Mutant(
        "states are written with each snapshot",
        _FILES,
        "if new and (now or self._exact or began >= self._due):",
        "if new:",
        "snapshots take as long as all states",
        _IN_FILES,
    ),
    Mutant(
        "a damaged state is an error",
        "ps/checkpoint/snapshots.py",
        '        except DamagedError as error:\n            report(log, "optimizer"',
        '        except KeyError as error:\n            report(log, "optimizer"',
        "a job cannot be resumed because of it",
        _IN_FILES,
    ),
    Mutant(
        "files of old states stay",
        "ps/checkpoint/snapshots.py",
        '_NEEDED = ("log", "optimizer", "table")',
        '_NEEDED = ("log", "table")',
        "the checkpoint grows without end",
        _IN_FILES,
    ),
    Mutant(
        "a state of another optimizer is loaded",
        _STATE,
        "if state.layout != layout:",
        "if False:",
        "moments of other weights move these",
        ("tests/keras_model/test_optimizer_state.py",),
    ),
)
