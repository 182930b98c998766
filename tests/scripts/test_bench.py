from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from bench import bare, groups, link, shards
from bench.command import main
from bench.kernels import Bare, Whole
from bench.measure import Case, Row, measure, measured
from bench.processes import Service, cpu_seconds, serving
from bench.ps import exchanges, other_rule
from bench.report import load, regressions, table
from bench.rig import rig
from support.patience import patience

from distkeras.ps.rules import center_rules, make
from distkeras.ps.rules.base import BLOCK


def rates(*values: float, calls: list[str] | None = None, name: str = "") -> Callable[[], float]:
    """Return a measurement that yields these rates one after the other and records its name at each call."""
    left = list(values)

    def run() -> float:
        if calls is not None:
            calls.append(name)
        return left.pop(0)

    return run


def row(**changes: Any) -> Row:
    settings: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Row))
    settings |= {"section": "ps", "case": "a case", "unit": "1/s", "ours": 8.0, "runs": 5}
    settings |= {"refused": "", "note": "", "processor": ""}
    return Row(**(settings | changes))


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine is twice as fast in the second round: the ratio of the medians would be 0.9 / 1.2.
    case = Case("ps", "a case", "1/s", rates(0.9, 1.8, 0.9), rates(1.0, 2.0, 1.2), rates(0.1, 0.2, 0.1))
    found = measure(case, 3)
    assert (found.ours, found.limit, found.naive) == (0.9, 1.2, 0.1)
    assert found.ratio_to_limit == pytest.approx(0.9, rel=1e-12)
    assert found.ratio_to_naive == pytest.approx(9.0, rel=1e-12)
    # 0.75, 0.9, 0.9: the quartiles are 0.825 and 0.9.
    assert found.spread_to_limit == pytest.approx(0.075 / 0.9, rel=1e-12)
    assert found.spread_to_naive == pytest.approx(0.0, abs=1e-12)
    assert found.refused == ""
    assert found.runs == 3


def test_every_side_is_first_in_some_rounds() -> None:
    calls: list[str] = []
    ours, limit, naive = (rates(*[1.0] * 4, calls=calls, name=name) for name in "oln")
    measure(Case("ps", "a case", "1/s", ours, limit, naive), 4)
    assert "".join(calls) == "oln lno nol oln".replace(" ", "")


def test_the_rate_of_a_round_is_the_mean_of_its_turns() -> None:
    calls: list[str] = []
    ours = rates(1.0, 3.0, 4.0, 8.0, calls=calls, name="o")
    limit = rates(2.0, 2.0, 6.0, 6.0, calls=calls, name="l")
    found = measure(Case("ps", "a case", "1/s", ours, limit, turns=2), 2)
    assert "".join(calls) == "ol lo ol lo".replace(" ", "")
    assert (found.ours, found.limit, found.runs) == (4.0, 4.0, 2)
    assert found.ratio_to_limit == 1.0
    assert found.spread_to_limit == 0.0


def test_a_ratio_whose_rounds_disagree_is_refused() -> None:
    # 0.5, 0.8, 1.0: the quartiles are 0.65 and 0.9, 31 % of the median apart.
    case = Case("ps", "a case", "1/s", rates(0.5, 0.8, 1.0), rates(1, 1, 1), rates(0.05, 0.08, 0.1), target_limit=0.9)
    found = measure(case, 3)
    assert found.ratio_to_limit is None
    assert found.ratio_to_naive == pytest.approx(10.0, rel=1e-12)
    assert found.refused == "ratio to limit refused: its rounds disagree by 31%"
    assert not any(side.short for side in found.sides.values())
    assert "0.80" not in table([found])
    assert "refused" in table([found])


def test_a_case_may_have_no_limit() -> None:
    found = measure(Case("ps", "a case", "1/s", rates(3.0), None, rates(1.0), note=lambda: "taken last"), 1)
    assert (found.limit, found.ratio_to_limit, found.spread_to_limit) == (None, None, None)
    assert found.ratio_to_naive == 3.0
    assert found.note == "taken last"


def test_a_failed_measurement_is_reported_with_its_reason() -> None:
    calls: list[str] = []
    case = Case(
        "ps", "a case", "1/s", rates(calls=calls), rates(calls=calls), target_limit=0.9, missing="no such thing"
    )
    found = measure(case, 3)
    assert calls == []
    assert (found.ours, found.limit, found.ratio_to_limit, found.runs) == (None, None, None, 0)
    assert not any(side.short for side in found.sides.values())
    cells = [cell.strip() for cell in table([found]).splitlines()[2].strip("|").split("|")]
    assert cells[2:] == ["–", "≥ 0.9", "–", "–", "not measured: no such thing", ""]
    assert regressions([row(ratio_to_limit=1.0, spread_to_limit=0.1)], [found]) == []


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match=r"from 'limit' of 'a case'"):
        measure(Case("ps", "a case", "1/s", rates(1.0), rates(rate)), 1)


def test_cases_are_built_one_after_the_other() -> None:
    events: list[str] = []

    @contextmanager
    def factory(*names: str) -> Iterator[Any]:
        events.append(f"build {names[0]}")
        cases = [Case("ps", name, "1/s", rates(1.0, calls=events, name=name), rates(1.0)) for name in names]
        yield cases if len(cases) > 1 else cases[0]
        events.append(f"tear down {names[0]}")

    found = list(measured([partial(factory, "a"), partial(factory, "b", "skipped")], 1, only=""))
    assert [one.case for one in found] == ["a", "b", "skipped"]
    assert events == ["build a", "a", "tear down a", "build b", "b", "skipped", "tear down b"]
    found = list(measured([partial(factory, "a"), partial(factory, "b", "skipped")], 1, only="b"))
    assert [one.case for one in found] == ["b"]


def test_the_table_marks_ratios_below_their_target() -> None:
    rows = [
        row(ratio_to_limit=0.79, spread_to_limit=0.04, target_limit=0.8),
        row(ratio_to_limit=0.81, spread_to_limit=0.04, target_limit=0.8, note="why", processor="a processor"),
        row(ratio_to_naive=12.34, spread_to_naive=0.02, target_naive=10.0),
    ]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(rows).splitlines()]
    assert [len(line) for line in lines] == [8] * 5
    assert lines[2][2:6] == ["**0.79 ± 2%**, short", "≥ 0.8", "–", "–"]
    assert lines[3][2:] == ["0.81 ± 2%", "≥ 0.8", "–", "–", "why", "a processor"]
    assert lines[4][2:6] == ["–", "–", "12.3 ± 1%", "≥ 10"]
    assert [any(side.short for side in one.sides.values()) for one in rows] == [True, False, False]


def test_a_decrease_within_the_spreads_is_no_regression() -> None:
    old = [row(ratio_to_limit=1.0, spread_to_limit=0.10), row(case="only there", ratio_to_limit=1.0)]
    small = [row(ratio_to_limit=0.86, spread_to_limit=0.05), row(case="only here", ratio_to_limit=0.1)]
    large = [row(ratio_to_limit=0.85, spread_to_limit=0.05)]
    assert regressions(old, small) == []
    assert regressions(old, large) == ["ps: a case: 1.00 → 0.85 of the limit"]
    assert regressions(large, old) == [], "an increase is no regression"
    assert regressions(old, [row(spread_to_limit=0.5)]) == [], "a refused ratio cannot be compared"
    plain = [row(ratio_to_naive=20.0, spread_to_naive=0.01)], [row(ratio_to_naive=15.0, spread_to_naive=0.01)]
    assert regressions(*plain) == ["ps: a case: 20.0 → 15.0 times the plain way"]


@pytest.fixture
def toy_section(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that replaces a section with one whose only case has a given ratio to its limit."""

    def install(ratio: float) -> None:
        @contextmanager
        def case() -> Iterator[Any]:
            yield Case("groups", "a case", "1/s", lambda: ratio, lambda: 1.0, target_limit=0.5)

        monkeypatch.setattr(groups, "cases", lambda quick: [case])

    return install


def test_the_command_measures_reports_and_compares(
    toy_section: Callable[[float], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    toy_section(0.75)
    assert main(["--section", "groups", "--quick", "--json", str(good)]) == 0
    first = capsys.readouterr().out
    assert "| 0.75 ± 0% " in first
    content = json.loads(good.read_text())
    assert content["machine"]["numpy"] == np.__version__
    assert len(content["machine"]["load"]) == 3
    assert [(one["ratio_to_limit"], one["runs"]) for one in content["rows"]] == [(0.75, 3)]
    assert [one["processor"] for one in content["rows"]] == [content["machine"]["cpu"]]

    assert main(["--table", str(good)]) == 0
    assert capsys.readouterr().out == first

    toy_section(0.25)
    assert main(["--section", "groups", "--json", str(bad), "--compare", str(good)]) == 1
    assert "groups: a case: 0.75 → 0.25 of the limit" in capsys.readouterr().out
    toy_section(0.75)
    assert main(["--section", "groups", "--compare", str(bad)]) == 0
    assert "nothing is worse" in capsys.readouterr().out


def test_a_row_without_a_processor_was_measured_on_the_file_s(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    named, unnamed = (dataclasses.asdict(row(processor=processor)) for processor in ("another", ""))
    del unnamed["processor"]
    path.write_text(json.dumps({"machine": {"cpu": "this one"}, "rows": [named, unnamed]}))
    assert [one.processor for one in load(path)[1]] == ["another", "this one"]


@pytest.mark.slow
def test_real_servers_and_clients_are_measured() -> None:
    with rig(((3, 5), (5,)), 3, rule="dana_dc") as built:
        assert len(set(built.pids.values())) == 2
        for side, pid in built.pids.items():
            assert built.fleet.run(side, 0.02).exchanges >= 3, "each client exchanges at least once"
            assert cpu_seconds(pid) > 0
    with exchanges(((300,),), 2, 0.02) as cases:
        found = measure(cases[0], 1)
    assert all(rate is not None and rate > 0 for rate in (found.ours, found.limit))
    assert found.case == "0.0012 MB, 2 clients, downpour"


def test_without_a_shaped_link_the_rows_state_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # The path has no tools.
    rows = list(measured(link.cases(True), 1))
    assert len(rows) == 2 * 2
    assert {(one.ours, one.refused) for one in rows} == {(None, "not measured: unshare: No such file or directory")}


@pytest.fixture
def shaping() -> None:
    """Skip a test if no link can be shaped; this is tried without the benchmark's own code."""
    veth = "ip link add name near type veth peer name far"
    bucket = "tc qdisc add dev near root tbf rate 1gbit burst 128kb latency 50ms"
    command = ["unshare", "--net", "sh", "-c", f"{veth} && {bucket}"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=patience(60))
    except OSError as error:
        pytest.skip(f"shaping a link needs util-linux: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"shaping a link needs root and iproute2: {error.stderr}")


@pytest.mark.usefixtures("shaping")
def test_a_shaped_link_connects_its_ends_and_leaves_nothing_behind() -> None:
    with link.shaped(10) as shaped:
        device = Path("/sys/class/net") / shaped.device
        near = ["tc", "qdisc", "show", "dev", shaped.device]
        far = ["nsenter", f"--net={shaped.namespace}", "tc", "qdisc", "show", "dev", f"{shaped.device}f"]
        for command in (near, far):
            shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=patience(60)).stdout
            assert shown.startswith("qdisc tbf ")
            assert " rate 10Gbit " in shown
        with socket.create_server((shaped.host, 0)) as listener:
            listener.settimeout(patience(60))
            address = (shaped.host, listener.getsockname()[1])
            send = f"import socket; socket.create_connection({address}).sendall(bytes(4000))"
            with subprocess.Popen(["nsenter", f"--net={shaped.namespace}", sys.executable, "-c", send]):
                sock, _ = listener.accept()
                with sock, sock.makefile("rb") as stream:
                    assert len(stream.read(4000)) == 4000
        assert int((device / "statistics/rx_bytes").read_text()) > 4000
    assert not device.exists()
    assert not Path(shaped.namespace).exists()

    def fail() -> None:
        nonlocal device
        with link.shaped(1) as shaped:
            device = Path("/sys/class/net") / shaped.device
            assert device.exists()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not device.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("shaping")
def test_every_case_of_the_link_runs() -> None:
    rows = list(measured(link.cases(True), 1))
    assert len(rows) == 2 * 2
    assert all(one.ours and one.naive for one in rows)


def test_without_hosts_the_rows_of_shards_state_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # The path has no tools.
    rows = list(measured(shards.cases(True)[1:2], 1))
    assert [(one.case, one.ours) for one in rows] == [
        (f"1 Gbit/s links, 20 MB, {count} shards", None) for count in (2, 4)
    ]
    assert {one.refused for one in rows} == {"not measured: unshare: No such file or directory"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("shaping")
def test_every_case_of_shards_runs() -> None:
    rows = list(measured(shards.cases(True), 1))
    assert all(one.ours and not one.refused for one in rows)
    assert [one.ratio_to_limit for one in rows if one.limit] == [1.0, 1.0]


@pytest.mark.slow
def test_a_rule_that_does_more_than_add_has_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.ps.MEDIUM", ((300,),))
    with other_rule("lwp", 2, 0.02, 0.5) as case:
        found = measure(case, 1)
    assert (found.case, found.target_limit) == ("0.0012 MB, 2 clients, lwp", 0.5)
    assert all(rate is not None and rate > 0 for rate in (found.ours, found.limit))


@contextmanager
def connected(service: Service) -> Iterator[tuple[socket.socket, BinaryIO]]:
    """Yield a client's socket to a server, and its input stream."""
    with socket.create_connection(service.address, timeout=patience(60)) as sock, sock.makefile("rb") as stream:
        yield sock, stream


def test_the_bare_server_adds_each_commit_whole_and_answers_with_the_center() -> None:
    size, clients, commits = 2 * BLOCK + 17, 4, 20
    with serving(partial(bare.server, size)) as service:

        def converse(number: int) -> list[np.ndarray]:
            centers = []
            commit = np.full(size, number + 1, np.float32)
            with connected(service) as (sock, stream):
                for _ in range(commits):
                    sock.sendall(commit.data)
                    center = np.frombuffer(stream.read(commit.nbytes), np.float32)
                    assert center.size == size
                    assert center.min() == center.max(), "some commit was added only in part"
                    centers.append(center[:1])
            return centers

        with ThreadPoolExecutor(clients) as pool:
            found = list(pool.map(converse, range(clients)))
        for number, centers in enumerate(found):
            steps = np.diff(np.concatenate(centers), prepend=0)
            assert (steps >= number + 1).all(), "a center lacks the commit that it answers"
        assert max(float(centers[-1][0]) for centers in found) == commits * sum(range(1, clients + 1))


def test_the_bare_server_refuses_nan_and_partial_commits() -> None:
    size = BLOCK + 1
    with serving(partial(bare.server, size)) as service:
        good = np.ones(size, np.float32)
        bad = good.copy()
        bad[-1] = np.nan
        for refused in (bad, good[:-1]):
            with connected(service) as (sock, stream):
                sock.sendall(refused.data)
                sock.shutdown(socket.SHUT_WR)
                assert stream.read(1) == b""
        with connected(service) as (sock, stream):
            sock.sendall(good.data)
            assert stream.read(good.nbytes) == good.tobytes()


@pytest.mark.parametrize("name", center_rules())
def test_arithmetic_without_a_center_equals_the_center_s(name: str) -> None:
    """The limit of a rule's arithmetic is valid only if it computes what the center computes."""
    payload = np.random.default_rng(1).normal(scale=1e-3, size=BLOCK + 17).astype(np.float32)
    whole, bare = Whole(make(name), payload), Bare(make(name), payload)
    view = whole.center.traits.view
    for worker in range(2):
        whole.prepare(worker)()
        bare.prepare(worker)()
        if worker == 0:
            chunks = bare.applied[worker]
            result = np.concatenate([chunk.center if view else chunk.out for chunk in chunks])
            if not whole.center.traits.synchronous:
                np.testing.assert_allclose(whole.center.current.array, result, rtol=1e-6, atol=1e-12)
    if whole.center.traits.synchronous:
        result = np.concatenate([chunk.out for chunk in bare.applied[0]])
        np.testing.assert_allclose(whole.center.current.array, result, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", center_rules())
def test_no_rule_allocates_temporaries_of_the_vector_s_size(name: str) -> None:
    payload = np.full(32 * BLOCK, 1e-3, np.float32)
    # A rule may allocate one or two chunks, in float64 where sums need it: far less than the vector.
    assert Whole(make(name), payload).temporaries() < payload.nbytes / 4
