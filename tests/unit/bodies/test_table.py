"""What the table of blocks does beyond the rules that all environments keep."""

from __future__ import annotations

from leaderless.environments.bodies.table import Table


def test_tables_of_a_layout_differ_in_where_the_arm_is_alone() -> None:
    table = Table(4, num_layouts=2)
    tasks = [{"task": 0}, {"task": 2}, {"task": 1}, {"task": 0}]
    seen = table.reset(range(4), tasks, [7, 8, 7, 7])
    assert seen.instructions[0] == seen.instructions[1]
    blocks, arms = table._blocks, table._arms
    assert (blocks[0] == blocks[1]).all()
    assert (blocks[0] != blocks[2]).any()
    assert (arms[0] != arms[1]).any()
    assert (arms[0] == arms[3]).all()
    assert (seen.images["top"][0] == seen.images["top"][3]).all()
