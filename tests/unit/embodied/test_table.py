"""What the table of blocks does beyond the rules that all environments keep."""

from __future__ import annotations

import numpy as np
import pytest

from leaderless.embodied.simulators.tabletop import REACH, TableTask, TableTaskInSpace


def test_tables_of_a_layout_differ_in_where_the_arm_is_alone() -> None:
    table = TableTask(4, num_layouts=2)
    tasks = [{"task": 0}, {"task": 2}, {"task": 1}, {"task": 0}]
    seen = table.reset(range(4), tasks, [7, 8, 7, 7])
    assert seen.instructions[0] == seen.instructions[1]
    blocks, arms = table._blocks, table._arms
    assert (blocks[0] == blocks[1]).all()
    assert (blocks[0] != blocks[2]).any()
    assert (arms[0] != arms[1]).any()
    assert (arms[0] == arms[3]).all()
    assert (seen.images["top"][0] == seen.images["top"][3]).all()


@pytest.mark.parametrize("num_axes", [3, 4])
def test_the_expert_comes_down_to_the_block(num_axes: int) -> None:
    table, which = TableTaskInSpace(64, num_axes=num_axes), list(range(64))
    seen = table.reset(which, [{}] * 64, which)
    assert seen.state.shape == (64, num_axes)
    assert (seen.state[:, 2:] >= 0.3).all()
    done = np.zeros(64, np.bool_)
    while which:
        steps = table.step(which, table.expert(which)[:, None])
        done[which] = steps.success
        over = steps.terminated | steps.truncated
        assert (np.abs(steps.observations.state[steps.success, 2:]) < REACH).all()
        which = [one for one, is_over in zip(which, over, strict=True) if not is_over]
    assert done.mean() > 0.95


def test_an_arm_passes_above_a_block() -> None:
    table = TableTaskInSpace(1, num_blocks=2)
    table.reset([0], [{}], [3])
    table._arms[0] = [*table._blocks[0, 1 - table._targets[0], :2], 0.5]
    steps = table.step([0], np.zeros((1, 1, 3), np.float32))
    assert not steps.terminated[0]
    table._arms[0, 2] = 0.0
    steps = table.step([0], np.zeros((1, 1, 3), np.float32))
    assert (steps.terminated[0], steps.success[0]) == (True, False)


def test_axes_that_there_are_not_are_refused() -> None:
    with pytest.raises(ValueError, match="num_axes=2: must be 3 or 4; `table` has 2"):
        TableTaskInSpace(1, num_axes=2)
