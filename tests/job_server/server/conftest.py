"""Fixtures of one server for a module; its users' jobs do not affect each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
from support.job_server.service import JobService

from distkeras.keras_model import archive


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobService]:
    with JobService(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture(scope="session")
def model() -> bytes:
    """Return a small model as Keras saves it."""
    return archive.to_bytes(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="softmax")]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
