"""Plans in which engines span ranks: the engine has a layout of its own, next to that of the trainer."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.unit.recipes import begin, end, plan_of, write_model

from leaderless.config import RecipeError
from leaderless.planner import Layout, Plan, Reshard, SyncWeights
from leaderless.planner.show.text import print_plan
from leaderless.planner.workflow import Workflow

VLLM = {"engine": "vllm", "external": {"python": "/opt/vllm/bin/python"}}


def plan(layout: dict[str, object], world_size: int = 4, workflow: Workflow | str = "grpo", **sections: object) -> Plan:
    return plan_of(workflow, world_size, rollout=VLLM, layout=layout, **sections)


def test_an_engine_has_a_layout_of_its_own_on_the_ranks_of_its_trainer() -> None:
    made = plan({"rollout": {"tp": 2}})
    (instance,) = made.instances
    ranks = (0, 1, 2, 3)
    assert (instance.layout, instance.engine_layout) == (Layout(ranks, 4), Layout(ranks, 2, tp=2))
    assert {node.name for node in made.nodes if node.layout.tp > 1} == {"rollout"}
    moved = [action for action in made.schedule if isinstance(action, Reshard)]
    assert [(action.source, action.target_layout.dp) for action in moved] == [("rollout", 4)], "rows are sent once"
    assert not any(isinstance(action, SyncWeights) for action in made.schedule), "weights are on these ranks"


def test_a_pool_of_engines_is_sent_weights_for_all_of_its_ranks() -> None:
    made = plan({"rollout": {"ranks": "0-1", "tp": 2}, "policy": {"ranks": "2-3"}})
    served, trained = made.instances
    assert served.is_engine_only
    assert served.layout == served.engine_layout == Layout((0, 1), 1, tp=2)
    assert [action for action in made.schedule if isinstance(action, SyncWeights)] == [
        SyncWeights("policy", trained.layout, served.layout)
    ]


def test_a_model_that_is_never_trained_is_held_by_all_ranks_of_its_engines() -> None:
    workflow = Workflow("two").node("first", run="rollout", role="policy").node("second", run="rollout", role="other")
    workflow = workflow.node("reward", run="reward", after=["first", "second"])
    workflow = workflow.node("advantage", run="advantage", after="reward", where={"agent": "policy"})
    workflow = workflow.node("policy", run="update", role="policy", after="advantage")
    models = {"policy": "/no/such/model", "other": "/no/such/model"}
    made = plan({"second": {"tp": 4}}, workflow=workflow, models=models)
    frozen = next(one for one in made.instances if one.role == "other")
    assert (frozen.layout.dp, frozen.engine_layout) == (4, Layout((0, 1, 2, 3), 1, tp=4))
    assert not frozen.is_engine_only


def test_nodes_that_generate_with_a_role_on_the_same_ranks_share_its_engines() -> None:
    workflow = begin().node("more", run="rollout", role="policy")
    workflow = end(workflow.node("both", run="reward", after=["rollout", "more"]), "both")
    assert plan({"rollout": {"tp": 2}, "more": {"tp": 2}}, workflow=workflow).instances[0].generates
    message = (
        "layout.more: role 'policy' generates as ranks 0-3 dp=2 tp=2 for 'rollout' and as ranks 0-3 dp=1 tp=4 for "
        "'more': give both nodes one layout, or other ranks"
    )
    with pytest.raises(RecipeError, match=message):
        plan({"rollout": {"tp": 2}, "more": {"tp": 4}}, workflow=workflow)


def test_an_engine_spans_ranks_only_along_the_axes_that_it_declares() -> None:
    message = "layout.rollout: ranks 0-3 dp=2 cp=2: the engine 'vllm' cannot span ranks along cp: give 'rollout' a"
    with pytest.raises(RecipeError, match=message):
        plan({"rollout": {"cp": 2}})
    with pytest.raises(RecipeError, match=r"'native' cannot span ranks along tp: .* set rollout.engine to"):
        plan_of("grpo", 4, layout={"rollout": {"tp": 2}})


def test_ranks_of_one_engine_divide_its_weights_and_its_cache(tmp_path) -> None:
    def generating(tp: int, heads: int) -> dict[str, int]:
        model = write_model(tmp_path / str(heads), num_key_value_heads=heads)
        made = plan({"rollout": {"tp": tp}}, models={"policy": model})
        assert made.memory is not None
        return dict(made.memory.cpu.phases["policy generates"])

    alone, two, four = (generating(tp, 2) for tp in (1, 2, 4))
    assert alone["engine's weights"] == 2 * two["engine's weights"] == 4 * four["engine's weights"]
    assert alone["kv cache"] == 2 * two["kv cache"] == 2 * four["kv cache"], "two heads are divided into two parts"


def test_a_pool_that_may_not_restart_by_itself_keeps_no_weights_for_it(tmp_path) -> None:
    def kept(**sizes: int) -> set[str]:
        layout = {"rollout": {"ranks": "0-1", **sizes}, "policy": {"ranks": "2-3"}}
        made = plan(layout, models={"policy": write_model(tmp_path / "model")}, batch={"micro_batch_tokens": 1024})
        assert made.memory is not None
        return {*made.memory.cpu.resident, *made.memory.accelerator.host}

    assert ("weights for a restart" in kept(), "weights for a restart" in kept(tp=2)) == (True, False)


def test_the_layout_of_an_engine_is_shown() -> None:
    made, console = plan({"rollout": {"tp": 2}}), Console(file=io.StringIO(), width=200)
    print_plan(made, console)
    assert "generates with vllm on ranks 0-3 dp=2 tp=2" in console.file.getvalue()  # type: ignore[attr-defined]
    (role,) = made.to_json()["roles"]  # type: ignore[misc]
    assert (role["layout"], role["engine_layout"]) == ("ranks 0-3 dp=4", "ranks 0-3 dp=2 tp=2")


def test_a_rank_is_in_the_process_groups_of_its_peers_and_of_its_rows() -> None:
    mesh = Layout(tuple(range(8)), 2, tp=2, pp=2)
    assert [mesh.shard(rank) for rank in (0, 6)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [peers(5) for peers in mesh.peer_groups] == [(1, 5), (5, 7), (4, 5), (4, 5, 6, 7), (1, 5)]
    assert Layout(tuple(range(16)), 2, tp=2, pp=2, cp=2).part(3) == (1, 3, 9, 11)
    assert [peers(5) for peers in Layout((4, 5, 6, 7), 2, tp=2).peer_groups] == [(5, 7), (4, 5)]
    assert not mesh.flat.peer_groups


def test_a_rank_is_in_the_process_groups_of_its_experts() -> None:
    alone = Layout(tuple(range(4)), 4, ep=4)
    assert (alone.experts(1), alone.copies(1), alone.num_copies) == ((0, 1, 2, 3), (1,), 1)
    assert not alone.peer_groups, "all ranks have a process group already"
    some = Layout(tuple(range(1, 9)), 8, ep=2)
    assert [peers(4) for peers in some.peer_groups] == [(3, 4), (2, 4, 6, 8)]
    stages = Layout(tuple(range(16)), 2, pp=2, cp=2, tp=2, ep=4)  # shards of 8 ranks, of each 4 for a stage
    assert stages.stage(5) == (4, 5, 6, 7, 12, 13, 14, 15)
    assert (stages.experts(13), stages.copies(13)) == ((12, 13, 14, 15), (5, 13))
    names = {"ep": (12, 13, 14, 15), "copies": (5, 13)}
    assert names.items() <= stages.named_peers(13).items()
    groups = {peers(13) for peers in stages.peer_groups}
    assert {*stages.named_peers(13).values()} <= groups | {stages.ranks}
