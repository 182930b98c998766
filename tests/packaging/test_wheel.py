"""The wheel, built from the sources and used outside of them."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from support.patience import patience

ROOT = Path(__file__).parents[2]
PARTS = (
    "LICENSE", "README.md", "distkeras", "notebooks", "ps", "pyproject.toml", "scripts", "setup.py", "tests",
    "transformers",
)  # fmt: skip

SMOKE = """
import os, sys
import distkeras, distkeras.ps, distkeras.transformers
home = os.path.realpath(sys.argv[1])
for module in (distkeras, distkeras.ps, distkeras.transformers):
    assert os.path.realpath(module.__file__).startswith(home), module.__file__

import keras
import numpy as np
from pyspark.sql import SparkSession
from distkeras import AGN

spark = (
    SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false").getOrCreate()
)

def look(batches):
    import pyarrow as pa
    import distkeras
    yield pa.RecordBatch.from_pydict({"home": [os.path.realpath(distkeras.__file__)]})

for row in spark.range(2).repartition(2).mapInArrow(look, "home string").collect():
    assert row["home"].startswith(home), row

rng = np.random.default_rng(0)
labels = rng.integers(0, 2, 128)
points = rng.normal(size=(128, 2)) + 3.0 * (2 * labels[:, None] - 1)
df = spark.createDataFrame(list(zip(points.tolist(), labels.tolist())), "features array<float>, label int")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="softmax")])
model.set_weights([np.array([[0.1, -0.1], [0.1, -0.1]]), np.zeros(2)])
trainer = AGN(model, keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", batch_size=8, communication_window=2)
trained = trainer.train(df)
predicted = trained.predict(points.astype("float32"), verbose=0).argmax(-1)
assert (predicted == labels).mean() > 0.95
spark.stop()
print("trained")
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=patience(1500),
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def has_modern_setuptools() -> bool:
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building leaves files beside the sources."""
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".*")
    for part in PARTS:
        path = ROOT / part
        if path.is_dir():
            shutil.copytree(path, source / part, symlinks=True, ignore=ignored)
        elif path.exists():
            shutil.copy(path, source / part)
    out = tmp_path_factory.mktemp("wheel")
    # Without isolation nothing is downloaded; an older setuptools cannot read the license field.
    isolation = ["--no-isolation"] if has_modern_setuptools() else []
    run(sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_all_modules_are_in_it(names: list[str]) -> None:
    for target in ("distkeras", "distkeras/ps", "distkeras/transformers"):
        folder = ROOT / target.removeprefix("distkeras/")
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).parts
            if target == "distkeras" and parts[0] in ("ps", "transformers"):
                continue  # the links of a checkout
            assert "/".join([target, *parts]) in names
    assert "distkeras/ps/rules/agn.py" in names
    assert "distkeras/py.typed" in names


def test_license_is_in_it(names: list[str]) -> None:
    assert [name for name in names if name.endswith("LICENSE")]


def test_nothing_else_is_in_it(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert tops == {"distkeras", next(name for name in tops if name.endswith(".dist-info"))}
    assert len(names) == len(set(names))
    assert not [name for name in names if "test" in name or "__pycache__" in name or name.endswith(".pyc")]


def test_metadata(wheel: Path) -> None:
    (found,) = importlib.metadata.distributions(path=[str(wheel)])
    assert found.metadata["Name"] == "distkeras"
    assert found.metadata["License-Expression"] == "Apache-2.0"
    required = " ".join(found.requires or ())
    for name in ("keras", "numpy", "pyarrow", "pyspark"):
        assert name in required


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_smoke_training_with_the_wheel_and_the_packages_already_here(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", home, wheel, cwd=tmp_path)
    script = tmp_path / "smoke.py"
    script.write_text(SMOKE)
    assert "trained" in run(
        sys.executable, script, home, cwd=tmp_path, PYTHONPATH=str(home), PYSPARK_PYTHON=sys.executable
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smoke_training_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Downloads all dependencies."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path, PYTHONPATH="")
    script = tmp_path / "smoke.py"
    script.write_text(SMOKE)
    assert "trained" in run(python, script, home, cwd=tmp_path, PYTHONPATH="", PYSPARK_PYTHON=str(python))
