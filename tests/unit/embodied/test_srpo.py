"""Rewards of failed episodes by what they looked like, against loops, and what they must not depend on."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.unit.embodied.threads import Threads

from leaderless.algorithms.advantages.srpo import NOISE, centers_of, dbscan, self_referential_rewards, task_numbers
from leaderless.config import RecipeError
from leaderless.embodied.simulators.protocol import Continuous, Spaces
from leaderless.embodied.stages.films import RandomConvolution, Video, encoder_of, film_of


def worth(
    points: list[list[float]], success: list[bool], groups: list[int] | None = None, **more: object
) -> list[float]:
    is_valid = more.get("is_valid", [True] * len(points))
    found = self_referential_rewards(
        torch.tensor(points),
        torch.tensor(success),
        torch.tensor(is_valid),
        torch.tensor(groups or [0] * len(points)),
        scale=0.8,
        radius=0.5,
    )
    return found.tolist()


def test_failures_are_worth_what_the_formula_says() -> None:
    """Centers are 0 (a cluster of -1, 0 and 1) and nothing else: the success at 9 is noise."""
    places = [-1.0, 0.0, 1.0, 9.0, 2.0, 6.0, -4.0]
    found = worth([[place, 0.0] for place in places], [True] * 4 + [False] * 3)
    assert found[:4] == [1.0] * 4
    deviation = math.sqrt(((2 - 4) ** 2 + (6 - 4) ** 2) / 3)
    expected = [0.8 / (1 + math.exp((distance - 4) / deviation)) for distance in (2, 6, 4)]
    assert found[4:] == pytest.approx(expected)


def test_nearer_failures_are_worth_more_and_less_than_success() -> None:
    found = worth([[0.0], *([float(place)] for place in range(1, 9))], [True] + [False] * 8)
    assert found[1:] == sorted(found[1:], reverse=True)
    assert all(0 < one < 0.8 for one in found[1:])
    assert len(set(found)) == 9


def test_without_a_comparison_failures_are_worth_the_same() -> None:
    assert worth([[0.0], [3.0]], [False, False]) == [0.0, 0.0]
    assert worth([[0.0], [3.0]], [True, False]) == [1.0, 0.4]
    assert worth([[0.0], [0.1], [-0.1]], [True, False, False]) == [1.0, 0.4, 0.4]
    assert worth([[0.0], [0.1]], [True, True]) == [1.0, 1.0]


def test_order_other_groups_and_failed_rewards_change_nothing() -> None:
    torch.manual_seed(0)
    points, success = torch.randn(12, 5), torch.arange(12) % 3 == 0
    groups, is_valid = torch.arange(12) // 6, torch.ones(12, dtype=torch.bool)

    def of(rows: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return self_referential_rewards(points[rows], success[rows], valid[rows], groups[rows], scale=0.8, radius=1.0)

    whole = of(torch.arange(12), is_valid)
    order = torch.randperm(12)
    torch.testing.assert_close(of(order, is_valid), whole[order])
    torch.testing.assert_close(of(torch.arange(6, 12), is_valid), whole[6:])
    for lost in (0, 1):  # a success, a failure
        valid = is_valid.clone()
        valid[lost] = False
        rest = torch.tensor([row for row in range(12) if row != lost])
        torch.testing.assert_close(of(torch.arange(12), valid)[rest], of(rest, is_valid))


def test_failures_are_compared_with_successes_of_their_task_from_other_starts() -> None:
    """The second group has no success of its own, but is of the same task; the third is of another one."""
    places = torch.tensor([[0.0], [4.0], [1.0], [3.0], [5.0], [6.0]])
    success = torch.tensor([True, False, False, False, False, False])
    rows = ({"task": "a"}, {"task": "a"}, {"task": "a"}, {"task": "a"}, {"task": "b"}, {"task": "b"})
    tasks = task_numbers(rows, "task")
    found = self_referential_rewards(places, success, torch.ones(6, dtype=torch.bool), tasks, scale=0.8, radius=1.0)
    mean, deviation = 8 / 3, math.sqrt(((4 - 8 / 3) ** 2 + (1 - 8 / 3) ** 2 + (3 - 8 / 3) ** 2) / 3)
    expected = [0.8 / (1 + math.exp((distance - mean) / deviation)) for distance in (4, 1, 3)]
    assert found.tolist() == pytest.approx([1.0, *expected, 0.0, 0.0])
    assert task_numbers(({"task": [1, "x"]}, {"task": [1, "x"]}, {"task": [1, "y"]}), "task").unique().numel() == 2


def test_ranks_change_nothing_where_tasks_are_compared() -> None:
    torch.manual_seed(0)
    points, success, valid = torch.randn(24, 5), torch.rand(24) < 0.3, torch.rand(24) < 0.9
    tasks, ids = torch.arange(24) // 4 % 3, torch.randperm(24)
    whole = self_referential_rewards(points, success, valid, tasks, scale=0.8, radius=1.0)
    barrier, parts = threading.Barrier(3), [torch.zeros(0)] * 3
    found = torch.zeros(24, dtype=torch.float64)

    def run(rank: int) -> None:
        rows, group = torch.arange(24)[rank::3], Threads(rank, barrier, parts)
        found[rows] = self_referential_rewards(
            points[rows],
            success[rows],
            valid[rows],
            tasks[rows],
            scale=0.8,
            radius=1.0,
            episode_ids=ids[rows],
            gather=lambda one: torch.cat(group.gather(one, "rows")),
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, whole)


def reached(start: int, distances: list[list[float]], is_core: list[bool], radius: float) -> set[int]:
    """All points that are density-reachable from a core point, by definition."""
    found, waiting = {start}, [start]
    while waiting:
        here = waiting.pop()
        near = {other for other in range(len(distances)) if distances[here][other] <= radius}
        waiting += [other for other in near - found if is_core[other]]
        found |= near
    return found


@settings(max_examples=60, deadline=None)
@given(
    places=some.lists(some.integers(0, 40), min_size=1, max_size=12),
    radius=some.sampled_from([1.0, 2.0, 5.0]),
    min_points=some.integers(1, 4),
)
def test_clusters_are_those_of_the_definition(places: list[int], radius: float, min_points: int) -> None:
    distances = [[abs(float(a - b)) for b in places] for a in places]
    is_core = [sum(one <= radius for one in row) >= min_points for row in distances]
    labels = dbscan(torch.tensor(distances), radius, min_points).tolist()
    for first in range(len(places)):
        around = reached(first, distances, is_core, radius) if is_core[first] else set()
        assert is_core[first] is False or labels[first] != NOISE
        for other in range(len(places)):
            if is_core[first] and is_core[other]:
                assert (labels[first] == labels[other]) == (other in around)
        if not is_core[first] and labels[first] != NOISE:
            near = [core for core in range(len(places)) if is_core[core] and distances[first][core] <= radius]
            assert labels[first] in {labels[core] for core in near}
        if labels[first] == NOISE:
            assert not any(is_core[core] and distances[first][core] <= radius for core in range(len(places)))


def test_two_successes_are_one_cluster_at_radius_1_and_centers_of_their_own_below() -> None:
    points = torch.tensor([[0.1, 0.3], [0.7, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(centers_of(points, 1.0), points.mean(0, keepdim=True))
    torch.testing.assert_close(centers_of(points, 0.9), points)


def test_films_are_spread_over_the_first_camera() -> None:
    spaces = Spaces({"top": (1, 2), "side": (1, 1)}, 0, Continuous((-1.0,), (1.0,)), 8)
    pixels = (torch.arange(5)[:, None] * 51).expand(5, 9).byte()
    film = film_of(pixels, spaces, 3)
    assert film is not None
    assert film.shape == (3, 3, 1, 2)
    torch.testing.assert_close(film[:, 0, 0, 0], torch.tensor([0.0, 0.4, 0.8]))
    assert film_of(pixels[:0], spaces, 3) is None


def test_the_convolution_is_always_the_same_and_sees_where_things_are() -> None:
    films = torch.zeros(3, 2, 3, 16, 16)
    for film, place in zip(films, (2, 4, 12), strict=True):
        film[:, :, place : place + 3, 2:5] = 1.0
    first, near, far = (RandomConvolution()(film) for film in films)
    assert torch.equal(first, encoder_of("convolution")(films[0]))
    assert float((first - near).norm()) < float((first - far).norm())


def test_v_jepa_embeds_films_and_other_models_are_refused(tmp_path: Path) -> None:
    from transformers import VJEPA2Config, VJEPA2Model

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "crop_size": 32, "frames_per_clip": 4}
    predictor = {"pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}
    model = VJEPA2Model(VJEPA2Config(**small, **predictor)).eval()
    model.save_pretrained(tmp_path)
    encode = encoder_of(str(tmp_path))
    assert isinstance(encode, Video)
    film = torch.rand(4, 3, 32, 32)
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    normal = ((film.movedim(1, -1) - mean) / deviation).movedim(-1, 1)[None]
    with torch.no_grad():
        expected = model.encoder(normal).last_hidden_state.mean(1)[0]
    torch.testing.assert_close(encode(film), expected)
    assert encode(torch.rand(4, 3, 20, 24)).shape == (32,)
    with pytest.raises(RecipeError, match="V-JEPA 2"):
        encoder_of(str(tmp_path / "nothing"))
