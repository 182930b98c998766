"""Optimizers of this package: Adam and momentum that train tables which travel by rows."""

from __future__ import annotations

from distkeras.keras_model.lazy_optimizers import LazyAdam, LazyMomentum

__all__ = ["LazyAdam", "LazyMomentum"]
