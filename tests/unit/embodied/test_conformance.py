"""The suite that every environment of bodies passes: a right one passes it, and each check finds what it is for."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest
from tests.unit.embodied.line import Line

from leaderless.embodied.simulators import conformance
from leaderless.embodied.simulators.conformance import CANNOT_SAVE, CHECKS, NotConforming, report

FAULTS = {
    "gray": "spaces_hold",
    "nan": "spaces_hold",
    "float64": "spaces_hold",
    "silent": "spaces_hold",
    "slot": "same_start",
    "fixed": "seeds_differ",
    "shared": "others_stay",
    "sorted": "rows_follow_the_order",
    "runs_on": "chunks_equal_single_steps",
    "late_reward": "chunks_equal_single_steps",
    "auto_reset": "chunks_equal_single_steps",
    "both": "ends_are_told_apart",
    "endless": "ends_are_told_apart",
    "forgets_chance": "saved_states_continue",
    "double_expert": "experts_act",
    "closes_once": "closes_twice",
}


@pytest.mark.parametrize("check", CHECKS)
def test_an_environment_that_keeps_the_rules_passes(check):
    check(Line)


@pytest.mark.parametrize(("fault", "name"), FAULTS.items())
def test_what_is_wrong_is_found(fault, name):
    with pytest.raises(NotConforming):
        getattr(conformance, name)(partial(Line, fault=fault))


def test_every_check_can_fail():
    assert set(FAULTS.values()) == {check.__name__ for check in CHECKS}


def test_what_cannot_be_saved_or_has_no_expert_is_no_fault():
    assert report(partial(Line, fault="no_save"))["saved_states_continue"] == CANNOT_SAVE
    assert set(report(partial(Line, fault="no_expert")).values()) == {"held"}


def test_the_command_says_what_is_broken():
    name = "tests.unit.embodied.line:Line"
    command = [sys.executable, "-m", "leaderless.embodied.simulators.conformance", name]
    broken = subprocess.run(
        [*command, json.dumps({"fault": "fixed"})], check=False, capture_output=True, text=True, timeout=60
    )
    assert broken.returncode == 1, broken.stderr
    assert "draw the start from the seed" in broken.stdout
    assert broken.stdout.count("held") == len(CHECKS) - 1
