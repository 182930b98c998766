"""dist-keras' evaluators, at their old path; see `distkeras.compat`. New code: `distkeras.transformers`."""

from distkeras.compat.stages import Evaluator
from distkeras.transformers.evaluators import AccuracyEvaluator

__all__ = ["AccuracyEvaluator", "Evaluator"]
