"""The benchmark of episodes compares ways that do the same."""

from __future__ import annotations

from pathlib import Path

from benchmarks.episodes import PROMPT_TOKENS, SAID_TOKENS, TOLD_TOKENS, WAYS, Bench, Results, Run, table


def test_all_ways_sample_the_same_tokens_and_read_what_they_say(tmp_path: Path) -> None:
    bench = Bench(tmp_path, num_turns=3, hidden_size=16)
    measured = {way: bench.measure(way, 3, 0.001) for way in WAYS}
    said = [tokens for _, tokens in measured.values()]
    assert all(tokens == said[0] for tokens in said)
    assert sum(map(len, said[0].values())) == 3 * 3 * SAID_TOKENS
    turn = SAID_TOKENS + TOLD_TOKENS
    whole = 3 * (3 * PROMPT_TOKENS + (1 + 2) * turn)
    assert [measured[way][0]["read_tokens"] for way in ("waits anew", "plays anew")] == [whole] * 2
    # In later turns, what was told and the last token that was said; and one more where a slot was full.
    least = 3 * (PROMPT_TOKENS + 2 * (TOLD_TOKENS + 1))
    for way in ("waits keeping", "plays keeping"):
        assert least <= measured[way][0]["read_tokens"] <= least + 6


def test_the_table_has_the_medians_of_each_way() -> None:
    runs = [
        Run(episodes=3, delay_s=0.5, way=way, seconds=seconds, busy_s=1.0, read_tokens=5, sampled_tokens=1)
        for number, way in enumerate(WAYS)
        for seconds in (9.0, (4 - number) * 2.0, 1.0)
    ]
    lines = table(Results(cores=2, versions={}, at_once=3, turns=1, runs=runs)).splitlines()
    assert [line.split(" | ")[3] for line in lines[2:]] == ["8.0", "6.0", "4.0", "2.0"]
    assert [line.split(" | ")[6] for line in lines[2:]] == ["1.00 × |", "1.33 × |", "2.00 × |", "4.00 × |"]
