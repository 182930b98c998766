"""The folder of trained groups: what is in it, who owns it, and what happens if a byte of it changes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import keras
import numpy as np
import pandas as pd
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from distkeras import Trainer
from distkeras.groups.results import GroupResults, WeightsById
from distkeras.groups.store import (
    GroupFolder,
    Manifest,
    StoredGroups,
    copy_groups,
    load_model_file,
    model_name,
)
from distkeras.ps.errors import ConfigurationError, DifferentJobError, OwnershipLostError, SnapshotError

KEYS = '{"type":"struct","fields":[{"name":"shop","type":"string","nullable":true,"metadata":{}}]}'
MANIFEST_OF_JOB = Manifest({"num_epoch": 3}, KEYS, "0" * 64)


def begun(uri: Path, *, resume: bool = False, manifest: Manifest = MANIFEST_OF_JOB) -> GroupFolder:
    opened = GroupFolder(str(uri))
    opened.begin(manifest, b"model", resume=resume)
    return opened


def test_a_folder_that_is_not_whole_has_not_begun(tmp_path: Path) -> None:
    """A driver that dies within `begin` leaves a claim, and a model without a manifest."""
    manifest = tmp_path / f"groups-{begun(tmp_path).run.removeprefix('run-')}.json"
    manifest.rename(f"{manifest}.draft")
    begun(tmp_path)
    assert Manifest.load(str(tmp_path)) == MANIFEST_OF_JOB
    with pytest.raises(ConfigurationError, match=r"`path` must be an empty folder, .* Received: .* with a job"):
        begun(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="with 1 files"):
        begun(other)
    assert (other / "notes.txt").read_text() == "mine"


def test_only_the_same_job_resumes_and_the_older_run_loses_the_folder(tmp_path: Path) -> None:
    model = "9372c470eeadd5ecd9c3c74c2b3cb633f8e2f2fad799250a0f70d652b6b825e4"  # of b"model"
    job = Manifest({"num_epoch": 3}, KEYS, model)
    older = begun(tmp_path, manifest=job)
    with pytest.raises(DifferentJobError, match="`num_epoch` must be 3"):
        begun(tmp_path, resume=True, manifest=Manifest({"num_epoch": 4}, KEYS, model))
    newer = begun(tmp_path, resume=True, manifest=job)
    assert newer.epoch > older.epoch
    assert newer.run != older.run
    with pytest.raises(OwnershipLostError):
        older.finish(job, ["late"], 1)
    assert newer.finish(job, ["part"], 1).files == ("part",)
    (tmp_path / model_name(job)).write_bytes(b"other")
    with pytest.raises(SnapshotError, match=r"model-9372c470.keras in .* Received: another content"):
        begun(tmp_path, resume=True, manifest=job)
    (tmp_path / model_name(job)).unlink()
    with pytest.raises(SnapshotError, match="Received: no such file"):
        load_model_file(str(tmp_path), job)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_reading_makes_no_folder(tmp_path: Path, scheme: str) -> None:
    uri = f"{scheme}{tmp_path}/gone"
    stored = StoredGroups(uri, KEYS, ("run-000001-0a1b2c3d/groups/part.parquet",), 1)
    assert Manifest.load(uri) is None
    with pytest.raises(SnapshotError, match="Received: no such file"):
        load_model_file(uri, MANIFEST_OF_JOB)
    with pytest.raises(SnapshotError, match="must be as they were written"):
        WeightsById(stored)
    with pytest.raises(SnapshotError, match="cannot be copied"):
        copy_groups(stored, str(tmp_path / "copy"))
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_each_change_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    begun(tmp_path)
    (place,) = tmp_path.glob("groups-*.json")
    sound = place.read_bytes()
    with pytest.raises(ConfigurationError, match="must hold the models of a finished job"):
        MANIFEST_OF_JOB.stored(str(tmp_path))
    for offset in range(len(sound)):
        place.write_bytes(sound[:offset] + bytes([sound[offset] ^ 1]) + sound[offset + 1 :])
        with contextlib.suppress(SnapshotError):
            assert Manifest.load(str(tmp_path)) == MANIFEST_OF_JOB, offset
    for damaged in (b"", b"[]", json.dumps({"identity": {}}).encode()):
        place.write_bytes(damaged)
        with pytest.raises(SnapshotError, match=rf"{place.name} in .* must be as it was written"):
            Manifest.load(str(tmp_path))


def rows(spark: SparkSession) -> DataFrame:
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    frame = pd.DataFrame({"shop": ["a", "b"] * 4, "features": x.tolist(), "label": np.ones(8)})
    return spark.createDataFrame(frame, "shop string, features array<float>, label float")


@pytest.fixture(scope="module")
def groups(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> GroupResults:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trainer = Trainer(model, "agn", worker_optimizer=keras.optimizers.SGD(1e-3), loss="mse", num_workers=1)
    path = tmp_path_factory.mktemp("groups") / "models"
    return trainer.train_groups(rows(spark), by="shop", path=path)


def damaged_reads(groups: GroupResults, place: Path, offsets: range) -> int:
    """Change one byte after the other; return how many changes are noticed; the others must change nothing."""
    sound, noticed = place.read_bytes(), 0
    lookup = WeightsById(groups.stored)
    expected = {group: lookup.weights(group) for _, group, _ in lookup.by_key()}
    try:
        for offset in offsets:
            place.write_bytes(sound[:offset] + bytes([sound[offset] ^ 0x15]) + sound[offset + 1 :])
            try:
                again = WeightsById(groups.stored)
                found = {group: again.weights(group) for group in expected}
                assert found == expected, offset
            except SnapshotError:
                noticed += 1
    finally:
        place.write_bytes(sound)
    return noticed


def test_no_changed_byte_loads_other_weights(groups: GroupResults) -> None:
    place = Path(groups.path, max(groups.stored.files, key=lambda name: Path(groups.path, name).stat().st_size))
    size = place.stat().st_size
    assert damaged_reads(groups, place, range(0, size, 7)) > size // 7 // 10


def test_spark_notices_changed_rows_and_lost_files(groups: GroupResults, spark: SparkSession) -> None:
    place = Path(groups.path, max(groups.stored.files, key=lambda name: Path(groups.path, name).stat().st_size))
    sound = place.read_bytes()
    Path(place.parent, f".{place.name}.crc").unlink()  # local filesystems have this check as well, and others do not
    weights = next(bytes(row["weights"]) for row in groups.weights.collect() if bytes(row["weights"]) in sound)
    offset = sound.index(weights)
    place.write_bytes(sound[:offset] + bytes([sound[offset] ^ 1]) + sound[offset + 1 :])
    with pytest.raises(PySparkException, match=r"SnapshotError: the trained groups in .* are damaged"):
        groups.weights.collect()
    place.rename(place.with_suffix(".away"))
    with pytest.raises(SnapshotError, match=r"the trained groups in .* cannot be read"):
        groups.model("a")
    place.with_suffix(".away").rename(place)
    place.write_bytes(sound)
    assert groups.table.count() == 2
    assert [row["rows"] for row in groups.table.where("shop = 'a' and error is null").collect()] == [4]
