"""GPUs that Spark assigns to tasks, on a machine without any."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest
from support.programs import output_of
from support.training import gpu_job


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the layer that looks is TensorFlow's")
def test_every_task_sees_the_gpu_that_spark_assigns_to_it(tmp_path: Path) -> None:
    """Spark would reuse a process that computes on one GPU for a task with the other one."""
    said = output_of(gpu_job.__file__, tmp_path, seconds=200, SPARK_LOCAL_IP="127.0.0.1", SPARK_TESTING="1")
    assert "at most 2" in said
    assert "slots by resource: cores 3, gpu 2" in said
    assert "Received: num_workers=3" in said
    seen = {tuple(file.name.split()): file.read_text() for file in (tmp_path / "seen").iterdir()}
    assert {(address, value) for (_, _, address), value in seen.items()} == {("0", "4 true"), ("1", "5 true")}
    stages: dict[str, set[str]] = {}
    for stage, _, address in seen:
        stages.setdefault(stage, set()).add(address)
    assert len(stages) == 3 * gpu_job.JOBS, "training, evaluation and prediction"
    assert list(stages.values()).count({"0", "1"}) >= gpu_job.JOBS, "the workers of a training run at once"
    assert len({process for _, process, _ in seen}) == len(seen), "a process computes for one task"
