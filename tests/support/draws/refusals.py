"""The jobs that are refused: which ones, and the sentence that each refusal must have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from distkeras.ps.rules import make
from support.draws.jobs import PLAIN, Job
from support.draws.models import RULES


class Refusal(NamedTuple):
    """Jobs that must be refused, and a part of the error's text."""

    applies: Callable[[Job], bool]
    text: str


def steps_at_server(job: Job) -> bool:
    name, hyper = RULES[job.rule]
    return make(name, **hyper).traits.gradient


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda job: job.setting in ("use_ema", "ema_overwrite_frequency") and job.optimizer != "MultiOptimizer",
        "`worker_optimizer` must not have `use_ema`: each worker would average its own path",
    ),
    Refusal(
        lambda job: job.optimizer in ("ScheduleFreeAdamW", "Ftrl"),
        "`worker_optimizer` must not store weights: a worker takes over those of the center",
    ),
    Refusal(lambda job: job.optimizer == "MultiOptimizer", "`worker_optimizer` must have one learning rate"),
    Refusal(
        lambda job: job.rule in PLAIN and job.setting in ("weight_decay", "excluded", "gradient_accumulation_steps"),
        "`worker_optimizer` must be SGD without momentum, weight decay, accumulation or steps of its own",
    ),
    Refusal(
        # Its kernel moves in each call, not by its gradient.
        lambda job: job.layer == "SpectralNormalization" and (job.rule in PLAIN or job.form == "frozen"),
        "`model` must be the same once it is rebuilt",
    ),
    Refusal(
        lambda job: steps_at_server(job) and is_scheduled(job),
        "`worker_optimizer` must have a number as its learning rate",
    ),
    Refusal(lambda job: job.rule in PLAIN and is_constrained(job), "`model` must have no constraints of trainable"),
    Refusal(lambda job: job.form == "own model", "`model` must have inputs and outputs"),
    Refusal(lambda job: job.form == "tied by assignment", "once it is rebuilt"),
    Refusal(lambda job: job.layer == "Lambda", "whose `function` is a Python lambda"),
    Refusal(lambda job: job.argument == "unregistered activation", "or name them in `custom_objects`"),
    Refusal(lambda job: job.layer == "RandomShear", "`model` must consist of Keras' classes and of registered ones"),
    Refusal(
        # Keras clips the gradient of a table row by row occurrence, and a rule's gradient is dense.
        lambda job: job.layer.endswith("Embedding") and job.setting == "clipnorm" and job.rule in PLAIN,
        "once it is rebuilt to",
    ),
    Refusal(
        # TensorFlow has this pooling in float16 only in XLA, and the check before a job takes an eager step.
        lambda job: job.layer == "AveragePooling3D" and "float16" in job.keras and job.option == "jit_compile",
        "NotFoundError",
    ),
    Refusal(lambda job: job.layer == "RandomCrop", "expected axis -1 of input shape to have value"),
)


def is_constrained(job: Job) -> bool:
    drawn = job.argument.startswith("constraint") or job.argument == "bias_constraint"
    return drawn and job.form != "frozen once compiled"  # its layer is not trainable


def is_scheduled(job: Job) -> bool:
    return job.rate not in ("number", "small")


def may_be_random(job: Job) -> bool:
    kinds = ("Attention", "CutMix", "Dropout", "GRU", "LSTM", "Masking", "Noise", "RNN", "Rand", "Solarization")
    return job.layer in ("Bidirectional", "Pipeline") or any(kind in job.layer for kind in kinds)


def refusal_of(job: Job, error: str) -> bool:
    """Return whether ``error`` is a refusal that is expected of a job."""
    return any(refusal.applies(job) and re.search(re.escape(refusal.text), error) for refusal in REFUSALS)


def is_refused(job: Job) -> bool:
    return any(refusal.applies(job) for refusal in REFUSALS)
