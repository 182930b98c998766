"""Tests of the project installed in each supported way and used outside its sources."""

from __future__ import annotations

import shutil
import venv
from dataclasses import dataclass
from pathlib import Path

import pyspark
import pytest
from support.installing import environment_without_it, install, run

SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"

#: A program whose argument is a part of the path that all modules must have.
IMPORT = """
import os, pkgutil, sys
import distkeras, distkeras.transformers

def fail(name):
    raise ImportError(name)

names = [info.name for info in pkgutil.walk_packages(distkeras.__path__, "distkeras.", fail) if info.ispkg]
for name in ("distkeras", *names):
    assert sys.argv[1] in os.path.realpath(sys.modules[name].__file__), name
print(len(names), "packages")
"""

SMOKE = """
import os, sys
import distkeras, distkeras.ps, distkeras.transformers
home = sys.argv[1]
for module in (distkeras, distkeras.ps, distkeras.transformers):
    assert home in os.path.realpath(module.__file__), module.__file__

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
    assert home in row["home"], row

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


SERVE = """
import os
import numpy as np
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient

os.mkdir("elsewhere")
os.chdir("elsewhere")
for name in ("numpy", "json", "distkeras"):
    with open(f"{name}.py", "w") as file:
        file.write("raise SystemExit('from the current directory')")
with ServerProcess(ServerSettings(make("downpour"), workers=1)) as process:
    driver = DriverClient(process.address)
    driver.publish(np.zeros(3, np.float32))
    print(driver.center().center.size, "elements served")
    driver.close()
"""


@dataclass(frozen=True)
class Installed:
    """An installation; ``home`` is a part of the path of each of its modules."""

    python: Path
    home: str
    zipped: Path | None = None

    def run(self, folder: Path, program: str) -> str:
        """Run ``program`` in ``folder``, and return its output."""
        script = folder / "program.py"
        script.write_text(program)
        environment = {"PYTHONPATH": str(self.zipped or ""), "PYSPARK_PYTHON": str(self.python)}
        return run(self.python, script, self.home, cwd=folder, **environment)

    def submit(self, folder: Path, program: str) -> str:
        """Run ``program`` as a Spark job in ``folder``, and return its output."""
        if self.zipped is None:
            return self.run(folder, program)
        script = folder / "program.py"
        script.write_text(program)
        command = (SUBMIT, "--master", "local[2,4]", "--conf", "spark.ui.enabled=false", "--py-files", self.zipped)
        return run(*command, script, self.home, cwd=folder, PYTHONPATH="", PYSPARK_PYTHON=str(self.python))


@pytest.fixture(scope="module")
def installed(
    request: pytest.FixtureRequest, wheel: Path, sdist: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    """Return an installation of the kind that the parameter names."""
    folder = tmp_path_factory.mktemp(request.param)
    python = environment_without_it(folder)
    if request.param == "zip":
        zipped = folder / "distkeras.zip"
        shutil.copy(wheel, zipped)
        return Installed(python, "distkeras.zip/distkeras", zipped)
    if request.param == "editable":
        install(python, "--editable", sources)
        return Installed(python, str(sources.resolve()))
    install(python, wheel if request.param == "wheel" else sdist)
    return Installed(python, str(folder.resolve()))


every_way = pytest.mark.parametrize(
    "installed",
    [*(pytest.param(way, marks=pytest.mark.slow) for way in ("wheel", "sdist", "editable")), "zip"],
    indirect=True,
    scope="module",
)


@every_way
def test_the_installation_can_be_imported(installed: Installed, tmp_path: Path) -> None:
    assert int(installed.run(tmp_path, IMPORT).split()[-2]) > 15


@every_way
def test_the_server_imports_nothing_from_the_current_directory(installed: Installed, tmp_path: Path) -> None:
    assert "3 elements served" in installed.run(tmp_path, SERVE)


@pytest.mark.slow
@pytest.mark.timeout(240)
@every_way
def test_the_installation_trains(installed: Installed, tmp_path: Path) -> None:
    assert "trained" in installed.submit(tmp_path, SMOKE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_installation_trains_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """This downloads all dependencies."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path, PYTHONPATH="")
    assert "trained" in Installed(python, str(home.resolve())).run(tmp_path, SMOKE)
