from __future__ import annotations

from pathlib import Path

import pytest

from distkeras.job_server.errors import DescriptionError
from distkeras.job_server.places import (
    require_allowed,
    require_listed,
    require_no_links,
    require_readable,
    require_writable,
)
from distkeras.job_server.settings import Settings
from distkeras.job_server.store.accounts import Account


@pytest.fixture
def roots(tmp_path: Path) -> list[str]:
    (tmp_path / "open" / "deep").mkdir(parents=True)
    (tmp_path / "closed").mkdir()
    return [str(tmp_path / "open"), "hdfs://name/data", "s3a://bucket"]


def test_data_below_a_root_is_allowed(tmp_path: Path, roots: list[str]) -> None:
    root = f"file://{tmp_path}/open"
    assert require_allowed(str(tmp_path / "open" / "a b.parquet"), roots, "data") == f"{root}/a b.parquet"
    assert require_allowed(f"file://{tmp_path}/open/deep", roots, "data") == f"file://{tmp_path}/open/deep"
    assert require_allowed("hdfs://name/data/x", roots, "data") == "hdfs://name/data/x"
    assert require_allowed("s3a://bucket/x", roots, "data") == "s3a://bucket/x"


@pytest.mark.parametrize(
    "place",
    [
        "{}/closed/x",
        "{}/open/../closed/x",
        "{}/openly",
        "{}",
        "/",
        "file://{}/closed/x",
        "file://elsewhere{}/open/x",
        "{}/open/{{a,b}}",
        "{}/open/*",
        "{}/open/[ab]",
        "{}/open/%2e%2e/closed",
        "{}/open/x#y",
        "{}/open/x\n",
        "hdfs://name/database/x",
        "hdfs://name:99/data/x",
        "hdfs://other/data/x",
        "hdfs:///data/x",
        "s3a://bucket2/x",
        "s3://bucket/x",
        "jdbc:postgresql://host/x",
        "http://bucket/x",
    ],
)
def test_data_outside_the_roots_is_refused(tmp_path: Path, roots: list[str], place: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        require_allowed(place.format(tmp_path), roots, "data")
    assert caught.value.field == "data"


def test_a_link_out_of_a_root_is_refused(tmp_path: Path, roots: list[str]) -> None:
    (tmp_path / "open" / "link").symlink_to(tmp_path / "closed")
    with pytest.raises(DescriptionError):
        require_allowed(str(tmp_path / "open" / "link" / "x"), roots, "data")


def test_without_a_root_no_data_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match="its operator has allowed none"):
        require_allowed(str(tmp_path), [], "data")


# ---- outputs of predictions

ANN = Account(2, "ann", "user")


def output(place: str, roots: list[str]) -> str:
    return require_writable(place, Settings(output=roots), ANN)


def test_a_user_may_write_below_a_folder_of_their_own_name(tmp_path: Path, roots: list[str]) -> None:
    root = f"file://{tmp_path}/open/ann"
    assert output(str(tmp_path / "open" / "ann" / "x"), roots) == f"{root}/x"
    assert output("hdfs://name/data/ann/x/y", roots) == "hdfs://name/data/ann/x/y"
    assert output("s3a://bucket/ann/x", [*roots, "s3a://bucket/"]) == "s3a://bucket/ann/x"


@pytest.mark.parametrize(
    "place",
    ["{}/open/x", "{}/open/ben/x", "{}/open/ann", "{}/open/ann/", "{}/open/ann/../ben/x", "{}/open/annabel/x", "{}/x"],
)
def test_an_output_outside_the_users_folder_is_refused(tmp_path: Path, roots: list[str], place: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        output(place.format(tmp_path), roots)
    assert caught.value.field == "output"


def test_a_link_out_of_the_users_folder_is_refused(tmp_path: Path, roots: list[str]) -> None:
    (tmp_path / "open" / "ann").mkdir()
    (tmp_path / "open" / "ben").mkdir()
    (tmp_path / "open" / "ann" / "link").symlink_to(tmp_path / "open" / "ben")
    with pytest.raises(DescriptionError):
        output(str(tmp_path / "open" / "ann" / "link" / "x"), roots)


@pytest.mark.parametrize("place", ["server", "server/files/x", "."])
def test_the_servers_own_files_are_refused(tmp_path: Path, place: str) -> None:
    settings = Settings([str(tmp_path), f"hdfs://{tmp_path}"], private=[tmp_path / "server" / "files"])
    (tmp_path / "else").mkdir()
    with pytest.raises(DescriptionError, match="own folder"):
        require_readable(str(tmp_path / place), "data", settings, ANN)
    for other in (str(tmp_path / "else"), f"hdfs://{tmp_path}/server"):
        assert require_readable(other, "data", settings, ANN).endswith(other)


# ---- checks by the driver


def test_links_within_a_folder_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "rows" / "deep").mkdir(parents=True)
    (tmp_path / "rows" / "link").symlink_to("deep")
    require_no_links(f"file://{tmp_path}/rows")
    require_no_links(f"file://{tmp_path}/nothing")
    require_no_links("hdfs://name/rows")


@pytest.mark.parametrize("link", ["rows", "rows/deep/link", "rows/link.parquet"])
def test_a_link_out_of_a_folder_is_refused_before_it_is_read(tmp_path: Path, link: str) -> None:
    """A user who may write to a folder cannot make a job read files that only the server may read."""
    (tmp_path / "closed").mkdir()
    if link != "rows":
        (tmp_path / "rows" / "deep").mkdir(parents=True)
    (tmp_path / link).symlink_to(tmp_path / "closed")
    with pytest.raises(DescriptionError, match="symbolic link"):
        require_no_links(f"file://{tmp_path}/rows")


def test_files_that_spark_lists_through_a_new_link_are_refused(tmp_path: Path, roots: list[str]) -> None:
    uri = require_allowed(str(tmp_path / "open" / "deep"), roots, "data")
    (tmp_path / "closed" / "a b.parquet").touch()
    (tmp_path / "open" / "deep" / "c.parquet").touch()
    require_no_links(uri)
    require_listed([f"{uri}/c.parquet"], uri)
    (tmp_path / "open" / "deep").rename(tmp_path / "open" / "moved")
    (tmp_path / "open" / "deep").symlink_to(tmp_path / "closed")
    for listed in (f"{uri}/a%20b.parquet", f"file://{tmp_path}/closed/a%20b.parquet"):
        with pytest.raises(DescriptionError, match=r"a b\.parquet"):
            require_listed([listed], uri)
    require_listed(["hdfs://name/data/x"], "hdfs://name/data")
