"""Golden steps: two or three commits of every rule, with every number computed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.ps.toy_model import ToyJob

from distkeras.ps.rules import Rule, center_rules, make
from distkeras.ps.rules.schedules import Schedule, StepDecay


def assert_close(actual: np.ndarray, expected: list[float]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", center_rules())
def test_every_rule_has_golden_steps(name: str) -> None:
    assert f'make("{name}"' in Path(__file__).read_text(encoding="utf-8")


def assert_trajectory(rule: Rule, expected: list[float], *, eta: Schedule | float = 0.1) -> ToyJob:
    """Commit for two workers in turn, from theta = 1 with g = theta; compare the center after each commit."""
    job = ToyJob(rule, [1.0], [[0] * 4, [0] * 4], gradient=lambda theta, _: theta, eta=eta)
    for number, center in enumerate(expected):
        assert_close(job.run([number % 2]), [center])
    return job


def test_downpour_per_batch() -> None:
    # g = theta, eta = .1. Both pull 1. Worker 0: delta = -.1, center .9. Worker 1, still at 1: -.1, center .8.
    # Worker 0 continues from .9: -.09, center .71.
    job = ToyJob(make("downpour"), [1.0], [[0, 0], [0, 0]], gradient=lambda theta, _: theta)
    assert_close(job.run([0]), [0.9])
    assert_close(job.run([1]), [0.8])
    assert_close(job.run([0]), [0.71])


def test_downpour_accumulated() -> None:
    # Window 2 from 1: .9, .81: delta -.19. The second worker adds the same delta: .62.
    job = ToyJob(make("downpour", window=2), [1.0], [[0] * 2, [0] * 2], gradient=lambda theta, _: theta)
    assert_close(job.run([0, 1]), [0.62])


@pytest.mark.parametrize(
    ("explore", "answers", "center"),
    [
        # g = v * theta with v = 1, 2, 3. The server is free at once: 1 - .1.
        (False, [False], 0.9),
        (True, [False], 0.9),
        # Occupied, then free. Both gradients at 1: 1 - .1 - .2; while exploring: .9 * .8.
        (False, [True, False], 0.7),
        (True, [True, False], 0.72),
        # Occupied until the window of 3 is full; then the server is not probed: 1 - .1 - .2 - .3, or .9 * .8 * .7.
        (False, [True, True], 0.4),
        (True, [True, True], 0.504),
    ],
)
def test_zealous_downpour(explore: bool, answers: list[bool], center: float) -> None:
    rule = make("zealous_downpour", window=3, explore=explore)
    probes = iter([*answers, False])  # the last one is for the window after the commit
    data = [[1.0, 2.0, 3.0, 0.0, 0.0]]
    job = ToyJob(rule, [1.0], data, gradient=lambda theta, v: theta * v, occupied=lambda worker: next(probes))
    assert_close(job.run([0]), [center])
    assert list(probes) == []


def test_agn() -> None:
    # The same delta -.19 over two steps: -.095 each. Then a window of one step from .905 - .095 = .81: -.081.
    job = ToyJob(make("agn", window=2), [1.0], [[0] * 3, [0] * 2], gradient=lambda theta, _: theta)
    assert_close(job.run([0, 1]), [0.81])
    assert_close(job.run([0]), [0.905 - 0.095 + (0.905 * -0.1)])


def test_downpour_continues_while_a_commit_is_in_flight() -> None:
    # eta = .1, gradient theta, two workers. Worker 0: 1 -> .9 (posted, -.1) -> .81 (-.09); worker 1 the same from 1.
    job = ToyJob(make("downpour"), [1.0], [[0] * 3, [0] * 2], gradient=lambda theta, _: theta, overlap=True)
    assert_close(job.run([0]), [0.9])
    assert_close(job.run([1]), [0.8])
    # Worker 0 computed its second payload before the reply, which is .9: the third window begins at .9 - .09 = .81.
    assert_close(job.run([0]), [0.71])
    # Worker 1 received .8 and begins no further window; its second payload is -.09.
    assert_close(job.run([1]), [0.62])
    assert_close(job.run([0]), [0.62 - 0.081])
    # Worker 0: the first window began at clock 0, and so did the second one, because the center that it began with
    # did not include the first commit; the third one began at clock 1. Its own commits since then count, too.
    assert job.center.log.commits()["staleness"].tolist() == [0, 1, 2, 3, 3]


def test_agn_continues_from_its_own_payload_while_the_commit_is_in_flight() -> None:
    # Two steps of .1 from 1 give .81 and the payload -.095. The next window begins at .905: .905 * .81 = .73305, which
    # gives the payload -.085975.
    job = ToyJob(make("agn", window=2), [1.0], [[0] * 4], gradient=lambda theta, _: theta, overlap=True)
    assert_close(job.run([0, 0]), [0.905 - 0.905 * 0.19 / 2])


def test_overlapped_asgd_takes_the_next_gradient_at_the_latest_received_center() -> None:
    # The second gradient is taken at 1 as well, and the third one at .9, the center after the first commit.
    job = ToyJob(make("asgd"), [1.0], [[0] * 3], gradient=lambda theta, _: theta, overlap=True)
    assert_close(job.run([0, 0]), [0.8])
    assert_close(job.run([0]), [0.8 - 0.09])
    assert job.center.log.commits()["staleness"].tolist() == [0, 1, 1]


def test_dynsgd() -> None:
    # Fixed gradients 1: every delta -.1. Worker 0: tau 0. Worker 1 then has tau 1: -.05. Worker 0, released at
    # clock 1, commits at clock 2: tau 1: -.05.
    job = ToyJob(make("dynsgd", window=1), [1.0], [[1.0, 1.0], [1.0]])
    assert_close(job.run([0]), [0.9])
    assert_close(job.run([1]), [0.85])
    assert_close(job.run([0]), [0.80])
    assert job.center.log.commits()["staleness"].tolist() == [0, 1, 1]


@pytest.mark.parametrize("algorithm", [11, 12])
@pytest.mark.parametrize(
    ("form", "scales"),
    [
        # The center has moved by d = (-.1, -.2) when worker 1 commits: 1 / (d^2 / divisor + 1).
        ("4.1", [1 / (0.01 / 0.1 + 1), 1 / (0.04 / 0.1 + 1)]),
        ("4.7", [1 / (0.01 / 0.02 + 1), 1 / (0.04 / 0.02 + 1)]),
        ("4.10", [1 / (0.01 / 0.0004 + 1), 1 / (0.04 / 0.0004 + 1)]),
        ("4.1norm", [1 / (0.05 / 0.1 + 1)] * 2),
        ("4.7norm", [1 / (0.05 / 0.02 + 1)] * 2),
    ],
)
def test_adag_at_the_server(algorithm: int, form: str, scales: list[float]) -> None:
    rule = make("adag", window=1, form=form, gamma=0.02, algorithm=algorithm)
    job = ToyJob(rule, [1.0, 1.0], [[[1.0, 2.0]], [[1.0, 2.0]]])
    assert_close(job.run([0]), [0.9, 0.8])  # the center has not moved before: a plain addition
    assert_close(job.run([1]), [0.9 - 0.1 * scales[0], 0.8 - 0.2 * scales[1]])
    scale = job.center.log.commits()["scale"][1]
    assert scale == pytest.approx(np.mean(scales), rel=1e-13)


def test_adag_13_restarts_from_the_pull_before_its_commit() -> None:
    # gamma = .01, g = 1, eta = .1, one worker. Commit 1: fresh = sent = 1, s = 1: center .9; the worker continues
    # from 1. Commit 2: delta = -.1, fresh = .9, d = -.1: s = 1 / (.01 / .01 + 1) = .5: center .85.
    job = ToyJob(make("adag", window=1, gamma=0.01, algorithm=13), [1.0], [[1.0] * 3])
    assert_close(job.run([0]), [0.9])
    assert_close(job.replicas[0].theta, [1.0 - 0.1])  # the worker has already computed its next local step, from 1
    assert_close(job.run([0]), [0.85])


def test_adag_on_agn_and_on_the_plain_accumulated_gradient() -> None:
    # Window 2, g = 1: delta -.2; AGN halves it.
    for normalize, expected in ((True, 0.9), (False, 0.8)):
        job = ToyJob(make("adag", window=2, normalize=normalize), [1.0], [[1.0] * 2])
        assert_close(job.run([0]), [expected])


def test_aeasgd() -> None:
    # eta .1, rho 2: alpha .2. Worker 0: one step to .9; fresh center 1: E = -.02; worker .92, center .98.
    # Worker 1: .9; fresh .98: E = .2 * -.08 = -.016; center .964.
    # Worker 0 steps to .82; fresh .964: E = .2 * -.144 = -.0288; worker .8488, center .9352.
    job = ToyJob(make("aeasgd", window=1, rho=2.0), [1.0], [[1.0, 1.0, 1.0], [1.0]])
    assert_close(job.run([0]), [0.98])
    assert_close(job.replicas[0].theta, [0.92 - 0.1])
    assert_close(job.run([1]), [0.964])
    assert_close(job.run([0]), [0.9352])
    assert_close(job.replicas[0].theta, [0.8488 - 0.1])


def test_easgd() -> None:
    # alpha .2, both at .9 against the pulled 1: E = -.02 each; center .96 after the round; both workers at .92.
    # Round 2 at .82 against .96: E = -.028 each: center .904.
    job = ToyJob(make("easgd", window=1, rho=2.0), [1.0], [[1.0] * 3, [1.0] * 3])
    assert_close(job.run([0]), [1.0])  # the center does not move within a round
    assert_close(job.run([1]), [0.96])
    assert_close(job.replicas[0].theta, [0.82 + 0.028])  # the worker has moved to .82 and subtracted its next E
    assert_close(job.run([1, 0]), [0.904])


@pytest.mark.parametrize(
    ("condition", "rho", "steps"),
    [
        # eta 1/8, g = 1: |eta g| = 1/8 at each step, |theta - center| = k/8 before step k = 0, 1, …; alpha = 5/8.
        # 2.9: 1/8 <= 5/8 * k/8, first true at k = 2: the third step.
        ("2.9", 5.0, 3),
        # 2.10: 1/8 - 5/8 * k/8 < 1/8, first true at k = 1: the second step.
        ("2.10", 5.0, 2),
        # With rho = 0, 2.10 is 1/8 < 1/8, which is false: the window is not ended early.
        ("2.10", 0.0, 6),
    ],
)
def test_easgd_early_stopping(condition: str, rho: float, steps: int) -> None:
    rule = make("easgd", window=6, rho=rho, early_stopping=condition)
    job = ToyJob(rule, [1.0], [[1.0] * 12], eta=0.125)  # a power of two: the comparisons are exact
    job.run([0])
    assert job.center.log.commits()["steps"][0] == steps


def test_eamsgd() -> None:
    # eta .1, delta .5, rho 2, g = theta at the look-ahead. Step 1: v = 0 - .1 * 1 = -.1; theta .9.
    # Step 2: look-ahead .9 - .05 = .85: v = -.05 - .085 = -.135; theta .765.
    # Exchange: E = .2 * (.765 - 1) = -.047; theta .812, center .953; v stays.
    job = ToyJob(make("eamsgd", window=2, rho=2.0, momentum=0.5), [1.0], [[0] * 4], gradient=lambda theta, _: theta)
    assert_close(job.run([0]), [0.953])
    # Step 3 from .812: look-ahead .812 - .0675 = .7445: v = -.0675 - .07445 = -.14195; theta .67005.
    # Step 4: look-ahead .67005 - .070975 = .599075: v = -.070975 - .0599075 = -.1308825; theta .5391675.
    # Exchange: E = .2 * (.5391675 - .953) = -.0827665: center .8702335.
    assert_close(job.run([0]), [0.8702335])


def test_model_averaging() -> None:
    # Workers move to 1 - .1 * 1 = .9 and 1 - .1 * 3 = .7: mean .8. The next round begins at .8: .7 and .5, mean .6.
    job = ToyJob(make("averaging", window=1), [1.0], [[1.0, 1.0], [3.0, 3.0]])
    assert_close(job.run([0, 1]), [0.8])
    assert_close(job.run([1, 0]), [0.6])


def test_model_averaging_divides_by_contributions() -> None:
    # Worker 1 has one mini-batch only: worker 0 is alone in the second round.
    job = ToyJob(make("averaging", window=1), [1.0], [[1.0, 1.0], [3.0]])
    assert_close(job.run([0, 1]), [0.8])
    assert_close(job.run([0]), [0.7])


def test_asgd() -> None:
    # g = theta. Both pull 1; .9, then .8 (gradient of 1 again), then worker 0 with the gradient of .9: .71.
    job = ToyJob(make("asgd"), [1.0], [[0, 0], [0]], gradient=lambda theta, _: theta)
    assert_close(job.run([0, 1]), [0.8])
    assert_close(job.run([0]), [0.71])


#: Gradient rules, their learning rates, and the centers of `assert_trajectory`.
TRAJECTORIES: list[tuple[Rule, Schedule | float, list[float]]] = [
    # Heavy ball over all workers. v = 1: .9. v = .5 + 1 = 1.5: .75. Worker 0 at .9: v = .75 + .9 = 1.65: .585.
    (make("nag_asgd", momentum=0.5), 0.1, [0.9, 0.75, 0.585]),
    # The same with eta inside: u = .1, .15, .165.
    (make("asgdm", momentum=0.5), 0.1, [0.9, 0.75, 0.585]),
    # Its momentum is rescaled: eta halves before the third commit: u = .5 * (.15 / 2) + .05 * .9 = .0825.
    (make("asgdm", momentum=0.5), StepDecay(0.1, (2,), 0.5), [0.9, 0.75, 0.6675]),
    # Each worker's own v: 1: .9. 1: .8. Worker 0 at .9: v = .5 + .9 = 1.4: .66.
    (make("multi_asgd", momentum=0.5), 0.1, [0.9, 0.8, 0.66]),
    # u of worker 0: .1, then .05 + .09 = .14; of worker 1: .1.
    (make("shifted_momentum", momentum=0.5), 0.1, [0.9, 0.8, 0.66]),
    # The rate is the one that was sent with the parameters. eta halves at clock 1. Worker 1 received the old eta at
    # clock 0: u = .1. Worker 0 received the new eta after its first commit: u = .5 * (.1 / 2) + .05 * .9 = .07.
    (make("shifted_momentum", momentum=0.5), StepDecay(0.1, (1,), 0.5), [0.9, 0.8, 0.73]),
    # tau = 1. v = 1: .9, sent .8. v = 1.5: .75, sent .6. Worker 0 at .8: v = .75 + .8 = 1.55: .595.
    # Worker 1 at .6: v = .775 + .6 = 1.375: .4575.
    (make("lwp", momentum=0.5), 0.1, [0.9, 0.75, 0.595, 0.4575]),
    # v0 = 1, sends 1.5: .85. v1 = 1: .7. Worker 0 at .85: v0 = .5 + .85 = 1.35, sends .675 + .85 = 1.525: .5475,
    # which is DANA-Zero's .665 - .05 * (1.35 + 1).
    (make("dana_slim", momentum=0.5), 0.1, [0.85, 0.7, 0.5475]),
    # lambda 2. Worker 0 has no delay: .9, sent .85. Worker 1 at 1: 1 + 2 * (.9 - 1) = .8: .82, sent .82 - .05 * 1.8.
    # Worker 0 at .85: .85 + 2 * .7225 * (.82 - .85) = .80665; v0 = 1.30665: .689335.
    (make("dana_dc", momentum=0.5, compensation=2.0), 0.1, [0.9, 0.82, 0.689335]),
    # lambda 2. .9. Worker 1 at 1: .8: .82. Worker 0 at .9: .9 + 2 * .81 * (.82 - .9) = .7704: .74296.
    (make("dc_asgd", compensation=2.0), 0.1, [0.9, 0.82, 0.74296]),
    # As above, with v0 = .5 + .7704 = 1.2704: .69296.
    (make("dc_asgd", compensation=2.0, momentum=0.5), 0.1, [0.9, 0.82, 0.69296]),
    # m .6, epsilon 0, lambda0 2. MS = .4. Then MS = .24 + .4 = .64, lambda = 2 / .8 = 2.5: 1 + 2.5 * (.9 - 1) = .75:
    # .825.
    (make("dc_asgd", adaptive=True, compensation=2.0, decay=0.6, epsilon=0.0), 0.1, [0.9, 0.825]),
    # M = 0: .9, S = 1, sent .9 - .05 * .5 = .875. .8, M = 1, S = 0, sent .8 - .05 * 2 = .7.
    # Worker 0 at .875: .8 - .1 * (.875 + .5) = .6625. Worker 1 at .7: .6625 - .1 * (.7 + .5) = .5425.
    (make("smega2", momentum=0.5), 0.1, [0.9, 0.8, 0.6625, 0.5425]),
]


@pytest.mark.parametrize(("rule", "eta", "expected"), TRAJECTORIES)
def test_a_gradient_rules_centers(rule: Rule, eta: Schedule | float, expected: list[float]) -> None:
    assert_trajectory(rule, expected, eta=eta)


def test_dana_zero() -> None:
    # v0 = 1, sum 1: .9, sent .9 - .05 = .85. v1 = 1, sum 2: .8, sent .7. Worker 0 at .85: v0 = 1.35: .665.
    # Worker 1 at .7: v1 = .5 + .7 = 1.2: .545.
    job = assert_trajectory(make("dana_zero", momentum=0.5), [0.9, 0.8, 0.665, 0.545])
    assert_close(job.center.model[0], [1.35 + 1.2])


def test_ormo() -> None:
    # t 0: e 0: u = .1: .9. t 1: head 1: center -.05, u = .05; e 1: u += .05, center -.1 * 1.5: .7.
    # t 2, worker 0 at .9, sent at 1: e 0: u = .19: .61. t 3: head 2: center -.095; worker 1 at .7, sent at 2: e 1:
    # -.1 * 1.5 * .7: .41.
    job = assert_trajectory(make("ormo", momentum=0.5), [0.9, 0.7, 0.61, 0.41])
    assert_close(job.center.model[0], [0.095 + 0.1 * 0.5 * 0.7])


ROUNDS = [[1.0, 2.0], [3.0, 6.0]]  # the gradients of each worker


def test_ssgd() -> None:
    # Means 2 and 4.
    job = ToyJob(make("ssgd"), [1.0], ROUNDS)
    assert_close(job.run([0]), [1.0])
    assert_close(job.run([1]), [0.8])
    assert_close(job.run([1, 0]), [0.4])


def test_ssgdm() -> None:
    # u = .1 * 4: .6. u = .2 + .1 * 8 = 1: -.4.
    job = ToyJob(make("ssgdm", momentum=0.5), [1.0], ROUNDS)
    assert_close(job.run([1, 0]), [0.6])
    assert_close(job.run([0, 1]), [-0.4])


def test_ssgdm_local() -> None:
    # u0 = .1, u1 = .3: .6. u0 = .05 + .2, u1 = .15 + .6: -.4.
    job = ToyJob(make("ssgdm_local", momentum=0.5), [1.0], ROUNDS)
    assert_close(job.run([1, 0]), [0.6])
    assert_close(job.run([0, 1]), [-0.4])


def test_weight_decay_is_added_to_the_gradient_at_the_parameters_of_the_gradient() -> None:
    # g = 1 + .5 * 1: .85. Worker 1, still at 1: the same: .7.
    job = ToyJob(make("asgd", weight_decay=0.5), [1.0], [[1.0], [1.0]])
    assert_close(job.run([0, 1]), [0.7])


MEANS = [[1.0, 1.0, 0.0], [3.0, 3.0, 0.0]]  # movements of -.1 and -.3 in two rounds, mean -.2; then none


@pytest.mark.parametrize(
    ("nesterov", "expected"),
    [
        # m = -.2: 1 + .5 * (-.2 - .1). m = -.1 - .2 = -.3: .85 + .5 * (-.2 - .15). m = -.15: .675 + .5 * -.075.
        (True, [0.85, 0.675, 0.6375]),
        # 1 + .5 * -.2; .9 + .5 * -.3; .75 + .5 * -.15.
        (False, [0.9, 0.75, 0.675]),
    ],
)
def test_diloco(nesterov: bool, expected: list[float]) -> None:
    rule = make("diloco", window=1, server_rate=0.5, momentum=0.5, nesterov=nesterov)
    job = ToyJob(rule, [1.0], MEANS)
    assert_close(job.run([0]), [1.0])
    assert_close(job.run([1]), expected[:1])
    assert_close(job.run([1, 0]), expected[1:2])
    assert_close(job.run([0, 1]), expected[2:])


@pytest.mark.parametrize(
    ("form", "moments"),
    [
        # D = -.2, -.2, 0. v = .25 * .04 = .01; then .75 * .01 + .01 = .0175; then .75 * .0175.
        ("adam", [0.01, 0.0175, 0.013125]),
        # v < D^2 twice: v increases by .01 each time; then v > D^2 = 0: v decreases by .25 * 0.
        ("yogi", [0.01, 0.02, 0.02]),
        ("adagrad", [0.04, 0.08, 0.08]),
        # v of adam, which is replaced by its largest value in the third round.
        ("amsgrad", [0.01, 0.0175, 0.0175]),
    ],
)
def test_fedopt(form: str, moments: list[float]) -> None:
    # m = -.1, -.05 - .1, -.075; each step is .1 m / (sqrt(v) + .1): the first step of adam is .1 * -.1 / .2 = -.05.
    rule = make("fedopt", window=1, form=form, server_rate=0.1, beta_1=0.5, beta_2=0.75, epsilon=0.1)
    job, center = ToyJob(rule, [1.0], MEANS), 1.0
    for momentum, moment in zip([-0.1, -0.15, -0.075], moments, strict=True):
        center += 0.1 * momentum / (moment**0.5 + 0.1)
        assert_close(job.run([1, 0]), [center])
    assert_close(job.center.model[-1], moments[-1:])
    if form == "adam":
        assert_close(ToyJob(rule, [1.0], MEANS).run([0, 1]), [0.95])


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        # N = 2, movements of -.1. 1 + .5 * -.05. Then m = -.2 / 2 = -.1: .975 + .5 * (-.05 + .5 * -.1). Then -.025.
        (0.0, [0.975, 0.925, 0.9]),
        # c = .25. The same; then (1 - .5 + .25) * .5 * -.1 = -.0375: .975 + .5 * -.0875; then .25 * .5 * -.1 = -.0125.
        (0.5, [0.975, 0.93125, 0.9]),
    ],
)
def test_delayed_nesterov(activation: float, expected: list[float]) -> None:
    rule = make("delayed_nesterov", window=1, server_rate=0.5, momentum=0.5, activation=activation)
    job = ToyJob(rule, [1.0], [[1.0] * 3, [1.0] * 2])
    for number, center in enumerate(expected):
        assert_close(job.run([number % 2]), [center])
    assert job.center.counters == {"count": 1}
    assert_close(np.concatenate(job.center.model), [-0.1, -0.1])


def test_mla() -> None:
    # m = -.05: 1 + .5 * (-.1 - .025). m = -.075: .9375 + .5 * (-.1 - .0375).
    job = ToyJob(make("mla", window=1, server_rate=0.5, momentum=0.5), [1.0], [[1.0], [1.0]])
    assert_close(job.run([0]), [0.9375])
    assert_close(job.run([1]), [0.86875])


def test_mla_that_looks_further_ahead() -> None:
    # Sent .9375 + .25 * -.05 = .925: -.0925. m = -.025 - .04625 = -.07125: .9375 + .5 * (-.0925 - .035625).
    rule = make("mla", window=1, server_rate=0.5, momentum=0.5, reach=1.0)
    job = ToyJob(rule, [1.0], [[0] * 2], gradient=lambda theta, _: theta)
    assert_close(job.run([0]), [0.9375])
    assert_close(job.run([0]), [0.8734375])


def test_delay_adaptive() -> None:
    # Movements of -.1, T = 1. Staleness 0, 1, 0, 0: not scaled. Worker 0 then has staleness 3: scaled by 1/3.
    job = ToyJob(make("delay_adaptive", threshold=1), [1.0], [[1.0] * 2, [1.0] * 3])
    for worker, center in zip([0, 1, 1, 1, 0], [0.9, 0.8, 0.7, 0.6, 0.6 - 0.1 / 3], strict=True):
        assert_close(job.run([worker]), [center])
    assert job.center.log.commits()["scale"].tolist() == [1.0, 1.0, 1.0, 1.0, 1 / 3]


def test_the_default_threshold_of_delay_adaptive_is_the_number_of_workers() -> None:
    # n = 2: staleness 3 gives a scale of 2 / 3.
    job = ToyJob(make("delay_adaptive"), [1.0], [[1.0], [1.0] * 3])
    assert_close(job.run([1, 1, 1, 0]), [0.7 - 0.2 / 3])


def test_fedbuff() -> None:
    # Movements of -.1, M = 2. The center moves by their mean with the second commit. Worker 0 fills the next buffer
    # alone: its first movement began at clock 1, within the first buffer, so that its age is 1: 2^-.5.
    job = ToyJob(make("fedbuff", window=1), [1.0], [[1.0] * 3, [1.0] * 2])
    assert_close(job.run([0]), [1.0])
    assert_close(job.run([1]), [0.9])
    assert_close(job.run([0]), [0.9])
    assert_close(job.run([0]), [0.9 - 0.05 * (1 + 2**-0.5)])
    assert_close(job.center.log.commits()["scale"], [1.0, 1.0, 2**-0.5, 1.0])


@pytest.mark.parametrize(
    ("nesterov", "expected"),
    [
        # D = -.1 twice. m = -.1, then -.15.
        (False, [0.95, 0.875]),
        # D + .5 m = -.15, then -.175.
        (True, [0.925, 0.8375]),
    ],
)
def test_fedbuff_with_momentum(nesterov: bool, expected: list[float]) -> None:
    rule = make("fedbuff", window=1, exponent=0.0, server_rate=0.5, momentum=0.5, nesterov=nesterov)
    job = ToyJob(rule, [1.0], [[1.0] * 3, [1.0] * 3])
    assert_close(job.run([0, 1]), expected[:1])
    assert_close(job.run([0, 1]), expected[1:])


def test_the_drain_of_fedbuff_divides_by_the_buffers_size() -> None:
    # The drain applies the third movement of -.1 divided by the buffer's size 2.
    job = ToyJob(make("fedbuff", window=1, exponent=0.0), [1.0], [[1.0] * 2, [1.0]])
    assert_close(job.run([0, 1]), [0.9])
    assert_close(job.run([0]), [0.9 - 0.05])
    assert job.center.clock == 3


def test_fadas() -> None:
    # Movements of -.1, M = 2. D = -.1: m = -.05, v = .25 * .01 = .0025: .1 * -.05 / (.05 + .05) = -.05.
    # Worker 1 received the center of clock 0 and commits fifth, h = 0: age 2, above 1: half the rate. Then worker 0
    # commits with age 0.
    options = {"server_rate": 0.1, "beta_1": 0.5, "beta_2": 0.75, "epsilon": 0.05}
    job = ToyJob(make("fadas", window=1, **options), [1.0], [[1.0] * 8, [1.0] * 2])
    assert_close(job.run([0]), [1.0])
    assert_close(job.run([0]), [0.95])
    momentum, moment = -0.075, 0.004375  # m = .5 m + .5 D, v = .75 v + .25 D^2
    second = 0.95 + 0.1 * momentum / (moment**0.5 + 0.05)
    assert_close(job.run([0, 0]), [second])
    assert_close(job.run([1]), [second])
    assert job.center.counters == {"count": 1, "worst": 2}
    momentum, moment = -0.0875, 0.00578125
    assert_close(job.run([0]), [second + 0.1 / 2 * momentum / (moment**0.5 + 0.05)])
    assert job.center.counters == {}


def test_ringmaster() -> None:
    # g = theta, R = 2. Worker 1 commits three times: .9, .81, .729. Worker 0 has staleness 3, is refused and receives
    # .729 at clock 3. It computes the same mini-batch again: .6561. Worker 1 received .729 at clock 3: staleness 1.
    rule = make("ringmaster", threshold=2, patience=None)
    job = ToyJob(rule, [1.0], [[0] * 3, [0] * 5], gradient=lambda theta, _: theta)
    assert_close(job.run([1, 1, 1]), [0.729])
    assert_close(job.run([0]), [0.729])
    lease = job.center.leases[0]
    assert (job.center.clock, lease.sequence, lease.batch, lease.refusals) == (3, 1, 0, 1)
    assert_close(job.run([0]), [0.6561])
    assert (job.center.clock, lease.sequence, lease.batch, lease.refusals) == (4, 2, 1, 0)
    assert_close(job.run([1]), [0.6561 - 0.0729])
    assert job.center.log.commits()["staleness"].tolist() == [0, 0, 0, 0, 1]


def test_ringmaster_scales_a_commit_down_when_its_patience_is_exhausted() -> None:
    # Movements of -.1, R = 1, P = 1. Worker 0 is refused with staleness 2; its next commit, again of staleness 2, has
    # a scale of 1/2.
    job = ToyJob(make("ringmaster", threshold=1), [1.0], [[1.0] * 2, [1.0] * 6])
    job.run([1, 1, 0, 1, 1])
    assert_close(job.theta, [0.6])
    assert_close(job.run([0]), [0.55])
    assert job.center.log.commits()["scale"][-1] == 0.5
