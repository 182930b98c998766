"""Tests of how the server accepts predict jobs."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.job_server.service import JobService
from support.present import present

from distkeras.job_server.errors import JobState
from distkeras.job_server.server.endpoints import JobView


@pytest.fixture(scope="module")
def trained(service: JobService, model: bytes) -> str:
    """Return a finished job of ann's."""
    job: str = service.submit("ann", model).json["id"]
    assert service.finish(job) is JobState.DONE
    return job


def order(service: JobService, job: str) -> Any:
    viewer = present(service.accounts.authenticate(service.tokens["admin"]))
    return service.store.get(viewer, job).order


def test_an_uploaded_model_predicts(service: JobService, model: bytes) -> None:
    answer = service.predict("ann", model, options={"features_col": ["a", "b"], "batch_size": 7})
    assert answer.status == 201, answer.body
    jsonschema.validate(answer.json, JobView.model_json_schema(mode="serialization"))
    assert (answer.json["kind"], answer.json["state"]) == ("predict", "queued")
    assert "order" not in answer.json["description"]
    assert service.files.of(answer.json["id"]).sent_model.read_bytes() == model
    assert order(service, answer.json["id"]) == {
        "kind": "predict",
        "data": f"file://{service.data('rows')}",
        "output": f"file://{service.output('ann')}",
    }
    assert service.finish(answer.json["id"]) is JobState.DONE
    kinds = {job["id"]: job["kind"] for job in service.call("GET", "/jobs", "ann").json["jobs"]}
    assert kinds[answer.json["id"]] == "predict"


def test_the_model_of_a_job_predicts_even_after_the_job_was_removed(service: JobService, model: bytes) -> None:
    source = service.submit("ann", model).json["id"]
    service.finish(source)
    job = service.predict("ann", None, job=source).json["id"]
    assert service.call("DELETE", f"/jobs/{source}", "ann").status == 204
    assert service.files.of(job).sent_model.read_bytes() == model
    service.call("POST", f"/jobs/{job}/cancel", "ann")


def test_a_trained_model_may_be_larger_than_an_upload(folder: Path, model: bytes) -> None:
    """The trained model also has an optimizer's state."""
    with JobService(folder, upload_max=len(model)) as service:
        source = service.submit("ann", model).json["id"]
        service.finish(source)
        path = service.files.of(source).model
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("assets/more", bytes(100))
        assert service.predict("ann", path.read_bytes()).status == 422
        assert service.predict("ann", None, job=source).status == 201


def test_two_jobs_do_not_write_to_one_output_at_the_same_time(service: JobService, model: bytes) -> None:
    place = service.output("ann", "once")
    first = service.predict("ann", model, output=place).json["id"]
    for other in (place, f"{place}/below"):
        answer = service.predict("ann", model, output=other)
        assert (answer.status, answer.json["error"]["field"]) == (422, "output")
        assert first in answer.json["error"]["message"]
    other_place = service.predict("ann", model, output=f"{place}-2")
    assert other_place.status == 201
    service.call("POST", f"/jobs/{other_place.json['id']}/cancel", "ann")
    service.call("POST", f"/jobs/{first}/cancel", "ann")
    again = service.predict("ann", model, output=place)
    assert again.status == 201
    service.call("POST", f"/jobs/{again.json['id']}/cancel", "ann")


def test_missing_data_is_refused_at_submission(service: JobService, model: bytes) -> None:
    missing = str(service.files.root.parent / "data" / "missing")
    for answer in (service.predict("ann", model, data=missing), service.submit("ann", model, data=missing)):
        assert (answer.status, answer.json["error"]["field"]) == (422, "data")
        assert "must exist" in answer.json["error"]["message"]


@pytest.mark.parametrize("who", ["ben", "admin"])
def test_another_users_job_provides_its_model_to_an_administrator_only(
    service: JobService, trained: str, who: str
) -> None:
    answer = service.predict(who, None, job=trained)
    if who == "admin":
        assert answer.status == 201
        service.call("POST", f"/jobs/{answer.json['id']}/cancel", "admin")
        return
    assert (answer.status, answer.json["error"]["field"]) == (422, "job")
    absent = service.predict(who, None, job="f" * 32)
    assert absent.json["error"]["message"].replace("f" * 32, trained) == answer.json["error"]["message"]


def test_a_job_without_a_model_is_refused(service: JobService, model: bytes, trained: str) -> None:
    waiting = service.submit("ann", model).json["id"]
    predicts = service.predict("ann", None, job=trained).json["id"]
    for job in (waiting, predicts):
        answer = service.predict("ann", None, job=job)
        assert (answer.status, answer.json["error"]["field"]) == (422, "job")
        service.call("POST", f"/jobs/{job}/cancel", "ann")


def test_exactly_one_model_is_required(service: JobService, model: bytes, trained: str) -> None:
    for given in (service.predict("ann", None), service.predict("ann", model, job=trained)):
        assert (given.status, given.json["error"]["field"]) == (422, "model")


@pytest.mark.parametrize(
    ("description", "field"),
    [
        ({"data": "/etc/passwd"}, "data"),
        ({"output": "/etc/x"}, "output"),
        ({"output": "ben/x"}, "output"),
        ({"output": "ann"}, "output"),
        ({"output": "ann/../ben/x"}, "output"),
        ({"options": {"batch_size": 0}}, "options.batch_size"),
        ({"rule": "agn"}, "rule"),
    ],
)
def test_a_refused_job_leaves_nothing(
    service: JobService, model: bytes, description: dict[str, Any], field: str | None
) -> None:
    root = Path(service.output("")).parent
    if not str(description.get("output", "/")).startswith("/"):
        description = {"output": str(root / description["output"])}
    jobs = sorted((service.files.root / "jobs").iterdir())
    answer = service.predict("ann", model, **description)
    assert (answer.status, answer.json["error"].get("field")) == (422, field)
    assert list(service.files.uploads.iterdir()) == []
    assert sorted((service.files.root / "jobs").iterdir()) == jobs


def test_an_output_among_the_servers_own_files_is_refused(service: JobService, model: bytes) -> None:
    """A link in a user's own folder does not change that."""
    link = Path(service.output("ann", "link"))
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(service.files.root)
    answer = service.predict("ann", model, output=str(link / "jobs" / "x"))
    assert (answer.status, answer.json["error"]["field"]) == (422, "output")


def test_fetching_the_model_of_a_predict_job_is_an_error(service: JobService, model: bytes) -> None:
    job = service.predict("ann", model).json["id"]
    service.finish(job)
    for part in ("model", "history", "commits"):
        answer = service.call("GET", f"/jobs/{job}/{part}", "ann")
        assert (answer.status, "to predict" in answer.json["error"]["message"]) == (409, True)


def test_predictions_are_read_by_their_owner_only(folder: Path, model: bytes) -> None:
    """The folder of all outputs lies within the data that jobs may read."""
    with JobService(folder) as service:
        shared = replace(service.services.settings, data=[str(folder)])
        object.__setattr__(service.services, "settings", shared)
        scored = Path(service.output("ann"))
        scored.mkdir(parents=True)
        for who, data, status in (
            ("ann", scored, 201),
            ("admin", scored, 201),
            ("ben", scored, 422),
            ("ben", scored.parent, 422),
            ("ben", scored.parent.parent, 422),
        ):
            answer = service.submit(who, model, data=str(data))
            assert answer.status == status, (who, data)
            if status == 422:
                assert answer.json["error"]["field"] == "data"
