"""The model of the benchmark ends its responses where it should, and results are read correctly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.counting_model import END, FIRST_COUNTER, LONGEST, heavy_tailed, remaining, write_counting_model
from benchmarks.training_step_report import Results, Run, load, table

from leaderless.config.models import ModelConfig
from leaderless.models.attention.packed import PackedAttention
from leaderless.models.causal_lm import load_causal_lm


def test_lengths_are_drawn_with_the_first_token_and_counted_down(tmp_path: Path) -> None:
    wanted = {3: 0.25, 7: 0.75}
    write_counting_model(tmp_path, wanted, hidden_size=128, num_layers=1, vocabulary=2 * LONGEST)
    model = load_causal_lm(ModelConfig(path=str(tmp_path)), "policy")

    def following(tokens: list[int]) -> torch.Tensor:
        """[vocabulary], the probability of each next token."""
        attention = PackedAttention([len(tokens)], torch.device("cpu"))
        logits = model(torch.tensor(tokens), torch.arange(len(tokens)), attention, torch.tensor([len(tokens) - 1]))
        assert isinstance(logits, torch.Tensor)
        probabilities: torch.Tensor = logits[0].softmax(dim=-1)
        return probabilities

    with torch.no_grad():
        first = following([1, 2, 3])
        counts = torch.tensor([remaining(token) for token in range(FIRST_COUNTER, 2 * LONGEST)])
        for length, probability in wanted.items():
            assert float(first[FIRST_COUNTER:][counts == length - 1].sum()) == pytest.approx(probability, abs=0.01)
        response = [int(first.argmax())]
        while response[-1] != END:
            response.append(int(following([1, 2, 3, *response]).argmax()))
    assert len(response) == 7
    assert [remaining(token) for token in response[:-1]] == [6, 5, 4, 3, 2, 1]


def test_heavy_tailed_lengths_are_a_distribution_with_its_median() -> None:
    lengths = heavy_tailed(64, 1.1)
    assert sum(lengths.values()) == pytest.approx(1, abs=1e-3)
    assert sum(share for length, share in lengths.items() if length <= 64) == pytest.approx(0.5, abs=0.01)
    assert max(lengths) == LONGEST


def run(side: str, repeat: int, seconds: list[float]) -> Run:
    shares = {"step": 1.0, "generation": 0.5, "log_probs": 0.125, "update": 0.25}
    steps = [{phase: share * second for phase, share in shares.items()} for second in seconds]
    return Run(workload="even", side=side, repeat=repeat, versions={"torch": "2"}, steps=steps)


def test_ratios_are_of_the_runs_of_a_repeat(tmp_path: Path) -> None:
    runs = [run("leaderless", 0, [1, 2, 9]), run("trl", 0, [6]), run("trl", 1, [4]), run("leaderless", 1, [4])]
    runs.append(run("leaderless", 2, [3]))
    results = Results(cores=2, parameters={"even": 10}, workers=1, trl_batch=16, runs=runs)
    first, second, *_ = table(results).splitlines()[2:]
    assert first.endswith("| whole step | 3.00 | 5.00 | 42.7 | 2.00 (1.00 to 3.00) |")
    assert "| generation | 1.50 | 2.50 |" in second
    assert load(tmp_path / "none.json") is None
