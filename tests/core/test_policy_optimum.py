# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
How near the policy comes to the optimum: rounds of simulated texts are played on the cost curves of a GPU and of CPUs,
and the tokens in the time of a plain step are compared with those of the best fixed tree, found by enumeration. Costs
are learnt from noisy timings; no clock is read.
"""

from dataclasses import replace
from statistics import fmean

import pytest
from quick import one_in
from simulated_rounds import Drafter, Machine, Process, best_fixed_rate

from hf_falcon.core import costs, policy
from hf_falcon.core.costs import CostKey, default_prior

KEY = CostKey(1, 64, 2048, "sdpa", "torch.bfloat16", "cpu", 2, False, ())
BFLOAT16, FLOAT32 = default_prior(KEY), default_prior(KEY._replace(dtype="torch.float32"))
ON_GPU = default_prior(KEY._replace(device="GPU"))
QUIET = Machine(
    {0: 1.0, 1: 1.0, 3: 1.03, 7: 1.1, 15: 1.35, 31: 1.75, 64: 2.9}, 0.09, BFLOAT16, noise=0.06, spikes=0.03
)
# Another process takes a core: not only is all slower, a tree also takes more plain steps.
LOADED = replace(
    QUIET,
    times={0: 1.0, 1: 1.3, 3: 1.7, 7: 2.5, 15: 3.6, 31: 6.0, 64: 11.0},
    draft_pass=0.3,
    slower=1.6,
    noise=0.2,
    spikes=0.1,
)
MACHINES = {
    "GPU": Machine({0: 1.0, 64: 1.0}, 0.06, ON_GPU, ahead=True, noise=0.03, spikes=0.01),
    "small target on a GPU": Machine({0: 1.0, 64: 1.05}, 0.2, ON_GPU, ahead=True, noise=0.03, spikes=0.01),
    "CPU": QUIET,
    "CPU in float32": Machine(
        {0: 1.0, 1: 1.6, 3: 1.55, 7: 1.5, 15: 1.65, 31: 2.2, 64: 3.3}, 0.07, FLOAT32, noise=0.06
    ),
    "CPU without vectors": Machine({0: 1.0, 1: 1.9, 64: 58.0}, 0.1, BFLOAT16, noise=0.06, spikes=0.03),
    "loaded CPU": LOADED,
}
DRAFTERS = {
    "strong": Drafter(0.97, 0.6, 0.7),
    "fair": Drafter(0.9, 0.4, 0.7),
    "weak": Drafter(0.5, 0.15, 0.5),
    "random": Drafter(0.02, 0.01, 0.01),
    # As sure as the strong one, and never right.
    "wrong": Drafter(0.97, 0.6, 0.7, right=0.0),
}


def ratio_of(machine, drafter: Drafter, answers: int, tokens: int, skipped: int = 0, seeds: int = 1) -> float:
    """How many times as fast as plain decoding a process writes its answers, without the first ones."""
    found = []
    for seed in range(seeds):
        process = Process(machine, drafter, seed)
        found += [1.0 / process.answer(tokens) for _ in range(answers)][skipped:]
    return 1.0 / fmean(found)


@pytest.mark.parametrize("machine, drafter", one_in(3, MACHINES, DRAFTERS))
def test_near_the_optimum(machine, drafter):
    """No fixed tree is much better. A policy that looks at each round may be better than all."""
    best = best_fixed_rate(MACHINES[machine], DRAFTERS[drafter], rounds=100)
    found = ratio_of(lambda _: MACHINES[machine], DRAFTERS[drafter], 4, 200, skipped=1, seeds=3)
    assert found >= 0.95 * best


@pytest.mark.parametrize("drafter", ["random", "wrong"])
@pytest.mark.parametrize("machine", MACHINES)
def test_useless_drafters_cost_little_in_short_answers(machine, drafter):
    assert ratio_of(lambda _: MACHINES[machine], DRAFTERS[drafter], 5, 64, skipped=1) >= 0.96


def test_a_calibrated_drafter_is_fast_at_once():
    """Bad luck in the first rounds pauses another one. A calibrated one that is wrong nevertheless costs little."""

    def first_answers(drafter, calibration, machine=MACHINES["CPU in float32"]):
        processes = [Process(lambda _: machine, DRAFTERS[drafter], seed, calibration) for seed in range(8)]
        return 1.0 / fmean(1.0 / process.answer(64) for process in processes)

    calibration = 6 * [1.0]
    later = ratio_of(lambda _: MACHINES["CPU in float32"], DRAFTERS["fair"], 5, 64, skipped=1, seeds=4)
    assert 0.9 * later < first_answers("fair", calibration) > first_answers("fair", ())
    assert first_answers("wrong", calibration, MACHINES["CPU"]) > 0.85


@pytest.mark.parametrize(
    "drafter, least", [("strong", 1.08), pytest.param("fair", 1.08, marks=pytest.mark.slow), ("wrong", 0.96)]
)
def test_a_machine_that_is_busy_at_times(drafter, least):
    """The curve changes its shape every 400 tokens: drafting pauses soon, and comes back."""
    found = ratio_of(
        lambda tokens: LOADED if tokens // 400 % 2 else QUIET, DRAFTERS[drafter], 8, 400, skipped=1, seeds=4
    )
    assert found >= least


def test_a_process_soon_drafts_as_another_does():
    """Timings scatter, and trees have nearly the same sizes all the same."""
    sizes = []
    for noise in (0.03, 0.06):
        process = Process(lambda _, noise=noise: replace(QUIET, noise=noise, spikes=0.0), DRAFTERS["strong"])
        process.answer(300)
        sizes.append(process.sizes)
    pairs = list(zip(*sizes))
    assert sum(first == second for first, second in pairs) > 0.6 * len(pairs)


CONSTANTS = [
    (costs, "_RECENT"),
    (costs, "_PRIOR"),
    (costs, "_ROUNDS_KEPT"),
    (costs, "_STEP"),
    (costs, "_UNMEASURED_PASS"),
    (costs, "_SHORTEST_INTERVAL"),
    (costs, "_LONGEST_INTERVAL"),
    (policy, "_PRIOR"),
    (policy, "_DECAY"),
    (policy, "_LEAST"),
    (policy, "_PRIOR_OF_TREES"),
    (policy, "_PRIOR_OF_CALIBRATED"),
    (policy, "_DECAY_OF_TREES"),
    (policy, "_NEW"),
    (policy, "_NEW_RATE"),
    (policy, "_CREDIT"),
    (policy, "_PROBE_SHARE"),
    (policy, "_LONGEST_SINGLE"),
    (policy, "_LIKELY"),
    (policy, "_FIRST_NODES"),
]


def mean_ratio() -> float:
    cells = [("CPU", "strong"), ("CPU", "wrong"), ("GPU", "fair"), ("loaded CPU", "fair"), ("CPU in float32", "fair")]
    found = [ratio_of(lambda _, name=name: MACHINES[name], DRAFTERS[drafter], 4, 128) for name, drafter in cells]
    calibrated = Process(lambda _: MACHINES["CPU in float32"], DRAFTERS["fair"], 0, 6 * [1.0])
    return fmean([*found, calibrated.answer(128)])


@pytest.fixture(scope="module")
def usual_ratio():
    return mean_ratio()


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.8, 1.2])
@pytest.mark.parametrize("module, name", CONSTANTS)
def test_constants_need_no_precision(module, name, factor, usual_ratio, monkeypatch):
    """A fifth more or less changes little. Of decays and of the step, the distance from 1 is changed."""
    value = getattr(module, name)
    about_one = name in ("_DECAY", "_DECAY_OF_TREES", "_STEP")
    changed = 1.0 + factor * (value - 1.0) if about_one else factor * value
    monkeypatch.setattr(module, name, max(1, round(changed)) if isinstance(value, int) else changed)
    assert mean_ratio() == pytest.approx(usual_ratio, rel=0.05)


def test_what_the_optimum_is():
    """The enumeration tells machines apart: large trees where nodes are free, and none where each costs a step."""
    gpu, cpu = (best_fixed_rate(MACHINES[name], DRAFTERS["fair"]) for name in ("GPU", "CPU"))
    assert gpu > 2.5 > cpu > 1.5
    assert best_fixed_rate(MACHINES["CPU without vectors"], DRAFTERS["fair"]) == 1.0
