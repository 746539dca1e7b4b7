"""What ranks are about to send, compared in blocks as at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.data.test_block_routes import play

from leaderless.data.buffer.row_agreement import Unlike, unlike_in_blocks, unlike_of
from leaderless.planner import Layout


@given(st.data())
def test_all_ranks_find_in_blocks_what_one_finds_that_knows_all(data: st.DataObject) -> None:
    dp, tp = data.draw(st.integers(1, 20)), data.draw(st.sampled_from([1, 2, 3]))
    layout = Layout(tuple(range(2, 2 + 3 * dp * tp, 3)), dp, tp=tp)
    few = st.sampled_from([7, 7, 7, 7, 7, 7, 7, 7, 8, 9])
    of_rank = st.tuples(few, st.integers(0, 2), few)
    facts = np.array(data.draw(st.lists(of_rank, min_size=dp * tp, max_size=dp * tp)), dtype=np.int64)
    expected = unlike_of(layout, facts)
    talks = [unlike_in_blocks(layout, rank, facts[place]) for place, rank in enumerate(layout.ranks)]
    assert play(talks) == [expected] * (dp * tp)


def test_the_lowest_ranks_that_differ_are_named() -> None:
    layout = Layout((0, 1, 2, 3), 2, tp=2)
    facts = np.array([[5, 0, 1], [6, 1, 1], [6, 1, 4], [7, 1, 3]])
    assert unlike_of(layout, facts) == Unlike(3, (1, 3))
    assert unlike_of(layout, facts[:, [2, 1, 1]]) == Unlike(1, (1, 2))
    assert unlike_of(layout, np.ones((4, 3), dtype=np.int64)) == Unlike(None, None)
