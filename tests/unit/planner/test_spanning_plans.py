"""Plans in which engines span ranks: the engine has a layout of its own, next to that of the trainer."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.recipes import begin, end, plan_of, write_model
from transformers import Qwen3MoeConfig

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.planner import Layout, Plan, Reshard, SyncWeights
from leaderless.planner.memory.model_size import read_model_size
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


def test_stages_of_one_engine_divide_its_weights_and_its_cache(tmp_path) -> None:
    def generating(**layout: int) -> dict[str, int]:
        model = write_model(tmp_path / "model", num_key_value_heads=2)
        made = plan({"rollout": layout}, models={"policy": model})
        assert made.memory is not None
        return dict(made.memory.cpu.phases["policy generates"])

    alone, two, both = generating(), generating(pp=2), generating(pp=2, tp=2)
    assert alone["kv cache"] == 2 * two["kv cache"] == 4 * both["kv cache"]
    assert alone["engine's weights"] == 2 * two["engine's weights"] == 4 * both["engine's weights"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "weight", "expert", "key"),
    [
        ({}, 2, 2, 2),
        ({"quantization": "fp8_per_channel"}, 1, 1, 2),
        ({"quantization": "mxfp4", "kv_cache_dtype": "fp8_e5m2"}, 0.5625, 0.5625, 1),
        ({"quantization": "int8_per_channel_weight_only", "kv_cache_dtype": "nvfp4"}, 2, 1, 0.5625),
    ],
)
def test_numbers_of_low_precision_take_less_memory(
    tmp_path: Path, tp: int, arguments: dict[str, object], weight: float, expert: float, key: float
) -> None:
    path = write_model(tmp_path, model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16)
    rollout = {"engine": "vllm", "external": {"python": "/opt/vllm/bin/python", "arguments": arguments}}
    settings: dict[str, object] = {"layout": {"rollout": {"tp": tp}}}
    settings["models"] = {"policy": {"path": path, "compute_dtype": "bfloat16"}}
    made = plan_of("grpo", 2, rollout=rollout, **settings)
    plain, size = plan_of("grpo", 2, rollout=VLLM, **settings), read_model_size(ModelConfig(path=path))
    assert made.memory is not None
    assert size is not None
    assert plain.memory is not None
    found, whole = (one.memory.accelerator.phases["policy generates"] for one in (made, plain))
    others, experts = size.num_layer_parameters - size.num_expert_parameters, size.num_expert_parameters
    numbers = size.num_parameters - size.num_layer_parameters
    assert found["engine's weights"] * tp == pytest.approx(2 * numbers + weight * others + expert * experts, abs=2)
    assert found["kv cache"] == pytest.approx(whole["kv cache"] * key / 2, abs=1)


@pytest.mark.parametrize(
    ("layout", "more", "message"),
    [
        ({"pp": 4}, {}, "layout.rollout.pp: pp=4: the model of 'policy' has 2 layers, fewer than stages"),
        ({"tp": 4, "ep": 2}, {}, "layout.rollout.ep: ep=2, tp=4: vLLM divides experts among all ranks along tp"),
        ({"tp": 4, "ep": 4}, {}, "layout.rollout.ep: ep=4 does not divide the 6 experts of 'policy'"),
        (
            {"pp": 2},
            {"algorithm": {"replay_experts": True}},
            "layout.rollout.pp: pp=2: a stage of an engine knows the experts of its own layers alone",
        ),
    ],
)
def test_parts_that_an_engine_cannot_have_are_refused(
    tmp_path, layout: dict[str, object], more: dict[str, object], message: str
) -> None:
    config = Qwen3MoeConfig(
        num_hidden_layers=2, num_experts=6, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=4
    )
    config.save_pretrained(tmp_path)
    models = {"policy": str(tmp_path)}
    with pytest.raises(RecipeError, match=message):
        plan({"rollout": layout}, models=models, **more)
    made = plan({"rollout": {"tp": 2, "ep": 2}}, models=models)
    assert made.instances[0].engine_layout == Layout((0, 1, 2, 3), 2, tp=2, ep=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"engine": "native"}}, "are of vLLM, but role 'policy' generates with 'native': set roles.policy"),
        ({"layout": {"rollout": {"tp": 2}}}, "are engines of one rank each, but 2 ranks make one of role 'policy'"),
        (
            {"layout": {"rollout": {"ranks": "0"}, "policy": {"ranks": "1"}}},
            "has 2 engines, and 1 ranks generate with role 'policy': name one",
        ),
        (
            {"reward": {"judge": {"role": "judge"}}},
            "'a:1' generates with role 'policy', too: set roles.judge.rollout.external.addresses",
        ),
    ],
)
def test_engines_elsewhere_are_one_for_each_rank(changes: dict[str, dict[str, object]], message: str) -> None:
    def plan_with(changes: dict[str, dict[str, object]]) -> Plan:
        rollout = {"engine": "vllm", "external": {"addresses": ["a:1", "b:2"]}} | changes.get("rollout", {})
        models = {"policy": "/no/such/model"} | ({"judge": "/no/such/model"} if "reward" in changes else {})
        return plan_of("grpo", 2, **{**changes, "models": models, "rollout": rollout})

    with pytest.raises(RecipeError, match=f"external.addresses: {message}"):
        plan_with(changes)
    assert plan_with({}).instances[0].engine == "vllm"


def test_a_rank_has_no_memory_of_an_engine_elsewhere(tmp_path) -> None:
    def parts(**external: object) -> set[str]:
        model = write_model(tmp_path / "model")
        made = plan_of("grpo", 2, models={"policy": model}, rollout={"engine": "vllm", "external": external})
        assert made.memory is not None
        phases = {**made.memory.cpu.phases, **made.memory.accelerator.phases}
        return {name for phase in phases.values() for name in phase}

    own = {"kv cache", "engine's weights"}
    assert own <= parts(python="/opt/vllm/bin/python")
    assert not own & parts(addresses=["a:1", "b:2"])


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
