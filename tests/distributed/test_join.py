"""Workers with different plans or settings never begin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.tiny import tiny_model, write_recipe
from tests.unit.recipes import plan_of

from leaderless.config import load_recipe
from leaderless.data.batch import Batch
from leaderless.distributed.activity import Activity
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.observability.console import Display
from leaderless.planner import Cluster, Plan, make_plan
from leaderless.planner.plan import communicators
from leaderless.planner.workflow import resolve_workflow
from leaderless.stages.context import StageContext
from leaderless.worker.build import join
from leaderless.worker.build.join import add_process_groups, join_workers
from leaderless.worker.build.process import open_worker
from leaderless.worker.rank_info import RankInfo


def join_with(recipe_file: str, overrides: dict[int, str]) -> str:
    """The error on this rank when some ranks have other settings."""
    place = RankInfo.from_environment()
    recipe = load_recipe(recipe_file, [overrides[place.rank]] if place.rank in overrides else []).recipe
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))
    try:
        with join_workers(place, plan, 20, Activity()):
            return ""
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("override", ["optimizer.learning_rate=0.5", "steps=9"])
def test_ranks_with_different_plans_all_stop_and_name_who_differs(
    ranks: RankPool, tmp_path: Path, override: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_model())
    messages = ranks.run(4, join_with, str(recipe), {1: override, 3: override}, init_group=False)
    for rank, message in enumerate(messages):
        assert message.startswith(f"rank {rank}: ranks 1,3 have made another plan than rank 0")
        assert "start all workers with the same recipe, overrides, code and number of workers" in message
    assert ranks.run(4, join_with, str(recipe), {}, init_group=False) == [""] * 4


def train_with_stale_samples(recipe_file: str) -> tuple[str, bool]:
    """The error if samples claim to be of an earlier policy, and whether weights have changed."""
    recipe = load_recipe(recipe_file).recipe
    place = RankInfo.from_environment()
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))
    with open_worker(recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        rollout = worker.chain.stages["rollout"]

        def stale(batch: Batch, context: StageContext) -> Batch:
            result = rollout(batch, context)
            versions = result.jagged("policy_versions")
            return result.with_columns(policy_versions=replace(versions, values=versions.values - 1))

        worker.run_step()
        before = {name: weight.clone() for name, weight in worker.parts.roles.trained()["policy"].full_weights()}
        worker.chain.stages = {**worker.chain.stages, "rollout": stale}
        try:
            worker.run_step()
        except RuntimeError as error:
            weights = worker.parts.roles.trained()["policy"].full_weights()
            notes = "".join(getattr(error, "__notes__", ()))
            return f"{error} {notes}", all(bool((before[name] == weight).all()) for name, weight in weights)
    return "", False


def test_samples_of_an_earlier_policy_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model())
    for rank, (message, is_unchanged) in enumerate(
        ranks.run(2, train_with_stale_samples, str(recipe), init_group=False)
    ):
        # The first step teaches nothing, so that no update was made.
        assert "was drawn by policy version -1, but version 0 is trained" in message
        assert f"at step 2, in policy, on rank {rank}" in message
        assert is_unchanged


VLLM = {"rollout": {"engine": "vllm"}}
CONTINUOUS = {"capacity": 1, "mode": "continuous"}
CRITIC = {"models": dict.fromkeys(("policy", "critic"), "/no/such/model"), "algorithm": {"advantage": {"type": "gae"}}}
ALONE, LAST = {"ranks": "0"}, {"ranks": "1-3"}
REST = dict.fromkeys(("reward", "advantage", "policy"), LAST)
PLANS: dict[str, tuple[int, str, dict[str, object]]] = {
    "one pool": (4, "grpo", {}),
    "two pools": (4, "grpo", {"layout": {"rollout": ALONE, "policy": LAST}}),
    "tp": (4, "grpo", {"layout": {"policy": {"tp": 2}}}),
    "pp and tp": (4, "grpo", {"layout": {"policy": {"pp": 2, "tp": 2}}}),
    "two meshes": (4, "ppo", {"layout": {"policy": {"tp": 2}, "critic": {"pp": 2, "ranks": "2-3"}}} | CRITIC),
    "cp and an engine over ranks": (4, "grpo", {"layout": {"rollout": {"tp": 2}, "policy": {"cp": 2}}} | VLLM),
    "a channel": (4, "grpo", {"layout": {"rollout": ALONE, **REST}, "channels": {"rollout": {"capacity": 1}}}),
}


def connected(name: str) -> tuple[int, int]:
    """The process groups that this rank connects on its accelerator, and those that the plan counts."""
    world_size, workflow, sections = PLANS[name]
    return _connect(plan_of(workflow, world_size, **sections))


def _connect(plan: Plan) -> tuple[int, int]:
    device, warm_up, found = torch.device("meta"), ProcessGroup.warm_up, list[ProcessGroup]()

    def watched(self: ProcessGroup) -> None:
        if self.size > 1 and self.payload_device == device:
            found.append(self)
        warm_up(replace(self, payload_device=torch.device("cpu")))

    with patch.object(ProcessGroup, "warm_up", watched):
        transport = Transport(device, timeout_s=60, sharing=plan.helpers)
        add_process_groups(plan, transport)
    return len(found), communicators(plan)(transport.rank)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_counts_the_communicators_that_ranks_make(ranks: RankPool, name: str) -> None:
    counts = ranks.run(PLANS[name][0], connected, name)
    assert [made for made, _ in counts] == [planned for _, planned in counts]
    assert all(made for made, _ in counts)


def connected_with_a_helper() -> tuple[int, int]:
    """The same where rank 2 uses the device of rank 1."""
    layout = {"rollout": {"ranks": "0,2"}} | {name: {"ranks": "1"} for name in ("reward", "advantage", "policy")}
    plan = plan_of("grpo", 3, layout=layout, channels={"rollout": CONTINUOUS})
    helped = [replace(loop, helpers=((2, 1),) if loop.is_continuous else ()) for loop in plan.loops]
    return _connect(replace(plan, loops=tuple(helped)))


def test_ranks_that_share_a_device_have_no_communicator(ranks: RankPool) -> None:
    found = ranks.run(3, connected_with_a_helper)
    assert found[1] == (0, 0), "the world is in host memory"
    assert [made for made, _ in found] == [planned for _, planned in found]
    assert found[0][0] > 0, "the ranks that generate have devices of their own"


def look_for_folder(folders: list[str]) -> str:
    """The error of a rank that looks for the run's folder in another place."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    join.SHARED_FOLDER_S = 0.3
    try:
        join.check_shared(Path(folders[transport.rank]), transport.world)
    except RuntimeError as error:
        return str(error)
    return ""


def test_workers_that_see_other_folders_stop_together(ranks: RankPool, tmp_path: Path) -> None:
    shared, own = str(tmp_path / "shared"), str(tmp_path / "own")
    assert ranks.run(3, look_for_folder, [shared] * 3) == ["", "", ""]
    assert list((tmp_path / "shared").iterdir()) == []
    errors = ranks.run(3, look_for_folder, [shared, own, shared])
    assert all("ranks 1 do not see the folder" in error for error in errors)


def test_a_folder_that_rank_0_cannot_make_stops_all_workers(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    errors = ranks.run(2, look_for_folder, [str(tmp_path / "file/run")] * 2)
    assert all("rank 0 cannot write to the run's folder" in error and "Not a directory" in error for error in errors)
    assert errors[0] == errors[1]
