"""dist-keras' predictors, at their old path; see `distkeras.compat`. New code: `distkeras.transformers`."""

from distkeras.compat.stages import ModelPredictor, Predictor

__all__ = ["ModelPredictor", "Predictor"]
