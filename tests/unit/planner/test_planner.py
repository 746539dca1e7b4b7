from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.recipes import begin, end, only_problem, plan_of, write_model

from leaderless import train_backend
from leaderless.config import RecipeError
from leaderless.planner import Cluster, Layout, Reshard, format_ranks
from leaderless.planner.workflow import BUILTIN_STAGES, StageSpec, Workflow

KL = {"algorithm": {"kl": {"coefficient": 0.1}}}
SFT = {"data": {"train": {"path": "rows.jsonl", "response": "answer"}}}
TWO_POOLS = {"layout": {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2-3"}}}
STAGES = "tests.unit.recipes:"


TRAINS_WHOLE = "tests.unit.planner.test_planner:trains_whole"


@train_backend()
def trains_whole(setup):
    """A back end that is only declared."""


def refused(*args, **sections):
    with pytest.raises(RecipeError) as caught:
        plan_of(*args, **sections)
    return only_problem(caught.value)


@pytest.fixture
def stages(monkeypatch):
    """Adds stages that read and write what a test needs."""

    def add(name, reads=(), writes=(), **contract):
        monkeypatch.setitem(BUILTIN_STAGES, name, StageSpec("x:y", reads=reads, writes=writes, **contract))

    return add


# Which node gets which column from which


def test_grpo_resolves_every_column():
    plan = plan_of("grpo", **KL, batch={"updates_per_step": 2})
    assert [node.name for node in plan.nodes] == [
        "rollout", "reward", "old", "reference", "advantage", "samples", "policy"
    ]  # fmt: skip
    assert plan.pruned == ()
    assert plan["rollout"].reads == {"prompt_tokens": "data", "rows": "data"}
    assert plan["advantage"].reads == {"response_lengths": "rollout", "rewards": "reward", "reward_valid": "reward"}
    assert plan["policy"].reads == {
        "advantages": "advantage",
        "old_log_probs": "old",
        "policy_versions": "rollout",
        "prompt_tokens": "rollout",
        "ref_log_probs": "reference",
        "response_mask": "rollout",
        "reward_valid": "reward",
        "rollout_log_probs": "rollout",
        "temperatures": "rollout",
        "tokens": "rollout",
    }
    assert {node.row_set for node in plan.nodes} == {"data", "rollout"}


def test_a_node_gets_a_column_from_the_last_that_wrote_it_before():
    workflow = end(begin().node("penalty", run=STAGES + "length_penalty", after="reward"), "penalty")
    plan = plan_of(workflow.node("samples", run="record", after="advantage"))
    assert plan["penalty"].reads["rewards"] == "reward"
    assert plan["advantage"].reads["rewards"] == "penalty"
    assert plan["samples"].reads["rewards"] == "penalty"
    assert plan["samples"].reads["reward_valid"] == "reward"


def test_branches_that_come_together_keep_their_own_version_of_a_column(stages):
    stages("judge", ["rewards"], ["judgements"])
    stages("join", ["rewards", "judgements"], has_effect=True)
    workflow = begin().node("judge", run="judge", after="reward")
    workflow = workflow.node("penalty", run=STAGES + "length_penalty", after="reward")
    plan = plan_of(workflow.node("join", run="join", after=["judge", "penalty"]))
    assert plan["judge"].reads == {"rewards": "reward"}
    assert plan["join"].reads == {"rewards": "penalty", "judgements": "judge"}


def test_edges_say_what_goes_where_and_how():
    plan = plan_of("grpo", 4, **TWO_POOLS)
    edges = {(edge.source, edge.target): edge for edge in plan.edges}
    assert edges["data", "rollout"].kind == "local"
    assert edges["rollout", "reward"].kind == "local"
    assert edges["rollout", "policy"].kind == "reshard"
    assert edges["reward", "advantage"].columns == ("reward_valid", "rewards")
    samples = 128 * 8
    assert edges["reward", "advantage"].max_bytes == samples * (1 + 4)
    assert edges["data", "rollout"].max_bytes == 128 * (512 * 8 + 512)
    assert edges["rollout", "reward"].max_bytes == samples * (512 * 9 + 1) + 128 * 512


def test_bytes_of_a_row_set_that_is_filtered_before_it_is_sampled_count_prompts(stages):
    stages("keep", ["rows"], rows="filter")
    workflow = Workflow("w").node("keep", run="keep").node("policy", run="sft", role="policy", after="keep")
    plan = plan_of(workflow, **SFT)
    assert plan["policy"].row_set == "keep"
    (edge,) = [edge for edge in plan.edges if edge.target == "policy"]
    assert edge.max_bytes == 128 * (512 * 8 + 2048 * 8 + 2048 * 1)


# What is left out


def test_nodes_that_nobody_reads_are_left_out():
    plan = plan_of("grpo")
    assert plan.pruned == ("old", "reference")
    assert "ref_log_probs" not in plan["policy"].reads
    assert plan_of("grpo", **KL).pruned == ("old",)
    assert plan_of("grpo", batch={"updates_per_step": 2}).pruned == ("reference",)
    assert plan_of("grpo", run={"recorded_prompts": 0}).pruned == ("old", "reference", "samples")


def test_a_node_that_only_a_left_out_node_reads_is_left_out(stages):
    stages("judge", ["tokens"], ["judgements"])
    stages("summary", ["judgements"], ["summaries"])
    workflow = begin().node("judge", run="judge", after="rollout").node("summary", run="summary", after="judge")
    plan = plan_of(end(workflow, ["reward", "summary"]))
    assert plan.pruned == ("judge", "summary")


def test_a_filter_is_needed_when_its_rows_are(stages):
    stages("keep", ["rewards"], rows="filter")
    plan = plan_of(end(begin().node("keep", run="keep", after="reward"), "keep"))
    assert plan.pruned == ()


# Nodes that change rows


def test_a_filter_carries_the_columns_that_later_nodes_read():
    workflow = end(begin().node("keep", run=STAGES + "keep_informative", after="reward"), "keep")
    plan = plan_of(workflow)
    assert set(plan["policy"].reads.values()) == {"keep", "advantage"}
    assert plan["policy"].row_set == plan["advantage"].row_set == plan["keep"].row_set_after == "keep"
    assert plan["keep"].row_set == "rollout"
    assert plan["keep"].reads["tokens"] == "rollout"
    assert plan["keep"].reads["rewards"] == plan["keep"].reads["reward_valid"] == "reward"


def test_columns_are_carried_through_several_filters():
    keep = STAGES + "keep_informative"
    workflow = begin().node("first", run=keep, after="reward").node("second", run=keep, after="first")
    plan = plan_of(end(workflow, "second"))
    assert plan["policy"].reads["tokens"] == "second"
    assert plan["second"].reads["tokens"] == "first"
    assert plan["first"].reads["tokens"] == "rollout"


def test_prompts_may_be_filtered_before_they_are_sampled(stages):
    stages("keep", ["rows"], rows="filter")
    workflow = Workflow("w").node("keep", run="keep").node("rollout", run="rollout", role="policy", after="keep")
    plan = plan_of(end(workflow.node("reward", run="reward", after="rollout"), "reward"))
    assert plan["rollout"].reads == {"prompt_tokens": "keep", "rows": "keep"}
    assert plan["rollout"].row_set == "keep"


def test_a_filter_must_come_after_the_columns_that_it_carries(stages):
    stages("keep", ["tokens"], rows="filter")
    workflow = end(begin().node("keep", run="keep", after="rollout"), ["reward", "keep"])
    problem = refused(workflow)
    assert problem.key == "nodes.keep.after"
    assert "'keep' must come after 'reward' to carry the column along" in problem.message


def test_two_filters_without_an_order_are_refused_where_they_come_together():
    keep = STAGES + "keep_informative"
    workflow = begin().node("first", run=keep, after="reward").node("second", run=keep, after="reward")
    problem = refused(end(workflow, ["first", "second"]))
    assert problem.key == "nodes.advantage.after"
    assert "'first' and 'second' both change rows and neither comes after the other" in problem.message


@pytest.mark.parametrize("between", [(), ("keep",)])
def test_samples_are_made_once(stages, between):
    stages("keep", ["rewards"], rows="filter")
    workflow = begin()
    for name in between:
        workflow = workflow.node(name, run=name, after="reward")
    workflow = workflow.node("again", run="rollout", role="policy", after=between or "reward")
    problem = refused(end(workflow.node("more", run="reward", after="again"), "more"))
    assert problem.key == "nodes.again.after"
    assert "the rows behind node 'rollout' are samples already: leave one of the two nodes out" in problem.message


# Contracts of columns and roles


def test_a_cycle_is_refused():
    assert "nodes form a cycle" in refused(begin().node("a", run="reward", after="a")).message


def test_an_unknown_stage_is_refused():
    problem = refused(Workflow("w").node("a", run="rolout", role="policy"))
    assert problem.key == "nodes.a.run"
    assert "did you mean 'rollout'?" in problem.message


def test_a_column_that_nobody_writes_is_refused(stages):
    stages("typo", ["reward"], has_effect=True)
    problem = refused(begin().node("a", run="typo", after="reward"))
    assert problem.key == "nodes.a"
    assert problem.message == (
        "reads column 'reward', which no node before it writes: no node writes it (did you mean 'rewards'?)"
    )


def test_a_column_that_is_not_written_before_is_refused():
    workflow = begin().node("advantage", run="advantage", after="rollout")
    problem = refused(workflow.node("policy", run="update", role="policy", after=["advantage", "reward"]))
    assert problem.key == "nodes.advantage"
    assert "'reward' writes it but does not come before: add it to `after`" in problem.message


def test_responses_come_from_a_rollout_or_from_the_data():
    workflow = Workflow("w").node("reward", run="reward").node("record", run="record", after="reward")
    problem = refused(workflow, models={})
    assert problem.key == "nodes.record"
    assert "a rollout writes it, or the data when data.train.response is set" in problem.message


def test_two_writers_without_an_order_are_refused():
    workflow = begin().node("again", run="reward", after="rollout")
    problem = refused(end(workflow, ["reward", "again"]))
    assert problem.key == "nodes.again.after"
    assert "'reward' and 'again' both write 'rewards', and neither comes after the other" in problem.message


def test_a_stage_that_uses_a_model_needs_a_role():
    problem = refused(Workflow("w").node("rollout", run="rollout"))
    assert (problem.key, problem.message) == ("nodes.rollout.role", "stage 'rollout' needs a role, as role: policy")


def test_a_role_without_a_model_is_refused(stages):
    stages("judge", ["tokens"], roles={"model": "score"}, has_effect=True)
    problem = refused(end(begin(), "reward").node("judge", run="judge", role="policies", after="rollout"))
    assert problem.key == "models"
    assert problem.message == "must name a model for role 'policies' (did you mean 'policy'?)"


def test_a_model_without_a_role_is_refused():
    problem = refused("grpo", models={"policy": "p", "references": "r"})
    assert problem.key == "models.references"
    assert "no node of the workflow 'grpo' has this role (did you mean 'reference'?)" in problem.message


def test_a_model_of_a_node_that_is_left_out_may_be_named():
    assert "reference" in plan_of("grpo", models={"policy": "p", "reference": "r"}).pruned


def with_teacher(*after_teacher: str) -> Workflow:
    """GRPO with a role that is only scored, before the log-probabilities of the policy or alone."""
    workflow = begin().node("teacher", run="log_probs", role="teacher", after="reward")
    for name in after_teacher:
        workflow = workflow.node(name, run="log_probs", role="policy", after="teacher")
    return end(workflow, ["teacher", *after_teacher])


TWO_UPDATES = {"models": {"policy": "p", "teacher": "t"}, "batch": {"updates_per_step": 2}}


def test_an_update_does_not_take_log_probs_of_another_role_for_its_own(stages):
    problem = refused(with_teacher(), **TWO_UPDATES)
    assert problem.key == "nodes.policy"
    assert "reads column 'old_log_probs', which no node before it writes" in problem.message
    plan = plan_of(with_teacher("old"), **TWO_UPDATES)
    assert plan["policy"].reads["old_log_probs"] == "old"
    assert plan.pruned == ("teacher",)
    stages("distil", ["teacher_log_probs"], has_effect=True)
    plan = plan_of(with_teacher("old").node("distil", run="distil", after="teacher"), **TWO_UPDATES)
    assert plan["teacher"].writes == ("teacher_log_probs",)
    (edge,) = [edge for edge in plan.edges if edge.target == "distil"]
    assert edge.max_bytes == 128 * 8 * 512 * 4


def test_two_trained_roles_need_log_probs_of_their_own(stages):
    stages("keep", ["rewards"], rows="filter")
    workflow = with_teacher("old").node("learn", run="update", role="teacher", after="policy")
    workflow = workflow.node("keep", run="keep", after="policy")
    problem = refused(workflow.node("again", run="update", role="teacher", after="keep"), **TWO_UPDATES)
    assert problem.key == "nodes.learn.after"
    assert "trains role 'teacher', but would read old_log_probs of role 'policy' from node 'old'" in problem.message
    problem = refused(
        with_teacher("old")
        .node("keep", run="keep", after="policy")
        .node("again", run="update", role="teacher", after="keep"),
        **TWO_UPDATES,
    )
    assert problem.key == "nodes.again.after"
    own = with_teacher("old").node("theirs", run="log_probs", role="teacher", after="policy")
    plan = plan_of(own.node("learn", run="update", role="teacher", after="theirs"), **TWO_UPDATES)
    assert (plan["policy"].reads["old_log_probs"], plan["learn"].reads["old_log_probs"]) == ("old", "theirs")


@pytest.mark.parametrize("role", ["old", "rollout", "ref"])
def test_no_role_takes_the_name_of_a_column_that_is_another_owners(role):
    workflow = end(begin().node("mine", run="log_probs", role=role, after="rollout"), ["reward", "mine"])
    problem = refused(workflow, models={"policy": "p", role: "q"})
    assert problem.key == "nodes.mine.role"
    assert f"'{role}' cannot be the name of a role that is scored" in problem.message


# Settings that a stage refuses


@pytest.mark.parametrize(
    ("workflow", "sections", "key", "message"),
    [
        ("grpo", {"batch": {"responses_per_prompt": 1}}, "batch.responses_per_prompt", "must be at least 2"),
        ("grpo", {"rollout": {"temperature": 0}}, "rollout.temperature", "must be above 0"),
        (
            "grpo",
            {"rollout": {"top_p": 0.9, "engine": "vllm"}},
            "rollout.top_p",
            "only if top_k bounds their number by 1 to 256, and it is 0: set top_k, or set rollout.engine to native",
        ),
        (
            "grpo",
            {"rollout": {"top_k": 257, "engine": "vllm"}},
            "rollout.top_k",
            "is 257, but the engine 'vllm' of 'policy' records",
        ),
        (
            "grpo",
            {"rollout": {"top_k": 5, "min_p": 0.1, "engine": "sglang", "external": {"python": "python"}}},
            "rollout.top_k",
            "normalize: leave out top_k and min_p, or set rollout.engine to native",
        ),
        (
            "grpo",
            {"rollout": {"min_p": 0.1}, "training": {"backend": "megatron", "megatron": {"python": "p"}}},
            "training.backend",
            "'megatron' cannot score tokens of 'policy' over those alone that top_p, top_k and min_p leave: use fsdp",
        ),
        ("grpo", {"reward": {}}, "reward", "must name at least one reward"),
        (
            "grpo",
            {"batch": {"micro_batch_tokens": 1023}},
            "batch.micro_batch_tokens",
            "is 1023, but one sample may have 1024 tokens",
        ),
        (
            "grpo",
            {"batch": {"prompts_per_step": 3, "updates_per_step": 4}},
            "batch.updates_per_step",
            "is 4, more than the 3 prompts of a step",
        ),
        ("sft", {}, "data.train.response", "must name the column that node 'policy' imitates"),
        (
            "sft",
            {**SFT, "batch": {"micro_batch_tokens": 2559}},
            "batch.micro_batch_tokens",
            "is 2559, but one sample may have 2560 tokens",
        ),
        ("sft", {**SFT, "batch": {"prompts_per_step": 1, "updates_per_step": 2}}, "batch.updates_per_step", "is 2"),
    ],
)
def test_settings_under_which_a_stage_cannot_be_right_are_refused(workflow, sections, key, message):
    problem = refused(workflow, **sections)
    assert problem.key == key
    assert message in problem.message


def test_settings_at_the_limit_are_accepted():
    plan_of("grpo", batch={"micro_batch_tokens": 1024, "responses_per_prompt": 2})
    plan_of("sft", **SFT, batch={"micro_batch_tokens": 2560, "prompts_per_step": 2, "updates_per_step": 2})


def test_sequences_longer_than_the_context_of_a_model_are_refused(tmp_path):
    models = {"policy": write_model(tmp_path / "m", max_position_embeddings=1023)}
    problem = refused("grpo", models=models)
    assert problem.key == "data.max_prompt_tokens"
    assert "may have 1024 tokens, but the context of role 'policy'" in problem.message
    plan_of("grpo", models=models, data={"train": {"path": "x"}, "max_prompt_tokens": 511})
    assert "may have 2560 tokens" in refused("sft", models=models, **SFT).message


# Layouts


@pytest.mark.parametrize(
    ("layout", "key", "message"),
    [
        (
            {"policy": {"ranks": "0-2", "dp": 2}},
            "layout.policy",
            "dp 2 x tp 1 x pp 1 x cp 1 does not divide its 3 ranks",
        ),
        (
            {"reward": {"ranks": "0-2", "tp": 2}},
            "layout.reward",
            "tp 2 x pp 1 x cp 1 does not divide its 3 ranks (0-2)",
        ),
        ({"reward": {"ranks": "0-4"}}, "layout.reward.ranks", "names rank 4, but there are 4 (0-3): start at least 5"),
        ({"reward": {"ranks": "2-1"}}, "layout.reward.ranks", "range '2-1' runs backwards"),
        ({"reward": {"ranks": "1,0-1"}}, "layout.reward.ranks", "names a rank twice"),
        ({"rewards": {}}, "layout.rewards", "has no such node (did you mean 'reward'?)"),
        (
            {"rollout": {"pp": 2}, "policy": {}},
            "layout.rollout",
            "the engine 'native' cannot span ranks along pp: give 'rollout' a layout without pp",
        ),
        (
            {"reward": {"ranks": "0-9999999999"}},
            "layout.reward.ranks",
            "names rank 9999999999, but there are 4 (0-3)",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout, key, message):
    problem = refused("grpo", 4, layout=layout)
    assert problem.key == key
    assert message in problem.message


def test_more_ranks_than_prompts_are_refused():
    problem = refused("grpo", 4, batch={"prompts_per_step": 3})
    assert problem.key == "batch.prompts_per_step"
    assert "is 3, fewer than the 4 data-parallel ranks of node 'rollout'" in problem.message
    plan_of("grpo", 4, batch={"prompts_per_step": 4})


def test_nodes_on_samples_may_have_more_ranks_than_there_are_prompts():
    sizes = {"prompts_per_step": 1, "responses_per_prompt": 3}
    apart = {"rollout": {"ranks": "0"}, "policy": {"ranks": "1-3"}}
    plan_of("grpo", 4, layout=apart, batch=sizes)
    problem = refused("grpo", 4, layout=apart, batch=sizes | {"responses_per_prompt": 2})
    assert problem.message.startswith(
        "is 1 with 2 responses each, fewer than the 3 data-parallel ranks of node 'policy', so that some would have "
        "nothing to do: set at least 2"
    )
    together = apart | {"advantage": {"ranks": "1-3"}}
    problem = refused("grpo", 4, layout=together, batch=sizes)
    assert problem.message.startswith("is 1, fewer than the 3 data-parallel ranks of node 'advantage'")
    assert "set at least 3" in problem.message


def test_a_rank_with_nothing_to_do_is_refused_with_a_remedy_that_helps():
    problem = refused("grpo", 4, layout={"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2"}})
    assert (problem.key, problem.message) == (
        "layout",
        "rank 3 runs no node: start 3 workers or give every rank a node",
    )
    problem = refused("grpo", 4, layout={"rollout": {"ranks": "1-2"}, "policy": {"ranks": "3"}})
    assert problem.message == "rank 0 runs no node: give every rank a node"


def test_a_role_is_trained_on_one_layout(stages):
    stages("more", ["tokens"], roles={"model": "train"}, has_effect=True)
    workflow = end(begin(), "reward").node("more", run="more", role="policy", after="policy")
    problem = refused(workflow, 4, layout={"policy": {"ranks": "0-3"}, "more": {"ranks": "0-1"}})
    assert problem.key == "layout.more"
    assert "is trained by 'policy' on ranks 0-3 dp=4 and by 'more' on ranks 0-1 dp=2" in problem.message


def test_a_stage_of_ones_own_with_a_role_divides_its_ranks_like_any_model(stages):
    stages("scores", ["tokens"], roles={"model": "score"}, has_effect=True)
    stages("probe", ["tokens"], has_effect=True)
    workflow = end(begin(), "reward").node("probe", run="scores", role="policy", after="policy")
    stages_of_layers = {"policy": {"pp": 2}, "probe": {"pp": 2}}
    assert plan_of(workflow, 4, layout=stages_of_layers)["probe"].layout.pp == 2
    problem = refused(workflow, 4, layout={"probe": {"pp": 2}}, training={"backend": TRAINS_WHOLE})
    assert problem.key == "layout.probe"
    message = f"ranks 0-3 dp=2 pp=2: the back end '{TRAINS_WHOLE}' divides the ranks of a model by dp only"
    assert message in problem.message
    plan = plan_of(end(begin(), "reward").node("probe", run="probe", after="policy"), 4, layout={"probe": {"tp": 2}})
    assert plan["probe"].layout.ranks_per_shard == 2


def test_a_node_without_a_layout_runs_where_its_role_is_trained_or_behind_the_node_before():
    layouts = {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2-3"}}
    plan = plan_of("grpo", 4, **KL, batch={"updates_per_step": 2}, layout=layouts)
    ranks = {node.name: node.layout.ranks for node in plan.nodes}
    assert ranks["old"] == (2, 3)
    assert ranks["reward"] == ranks["reference"] == ranks["advantage"] == ranks["samples"] == (0, 1)


def test_all_nodes_run_on_all_ranks_when_nothing_is_said():
    plan = plan_of("grpo", 4)
    assert {node.layout for node in plan.nodes} == {Layout((0, 1, 2, 3), 4)}
    assert not [action for action in plan.schedule if isinstance(action, Reshard)]


def test_model_parallel_peers_are_neighbours_that_share_a_shard():
    layout = Layout((2, 3, 6, 7), dp=2, tp=2)
    assert [layout.shard_of(rank) for rank in layout.ranks] == [0, 0, 1, 1]
    assert [layout.represents(rank) for rank in layout.ranks] == [True, False, True, False]
    assert 6 in layout
    assert 4 not in layout
    assert str(layout) == "ranks 2-3,6-7 dp=2 tp=2"
    assert layout.holds_rows_like(Layout((2, 3, 6, 7), dp=2, cp=2))
    assert not layout.holds_rows_like(Layout((2, 3, 6, 7), dp=4))


@given(*[st.integers(1, 3)] * 4)
def test_a_layout_is_a_mesh_of_its_ranks(dp, pp, cp, tp):
    ranks = tuple(range(5, 5 + 2 * dp * pp * cp * tp, 2))
    layout = Layout(ranks, dp, tp, pp, cp)
    axes = ("dp", "pp", "cp", "tp")
    grid = np.array(ranks).reshape(dp, pp, cp, tp)
    for rank in ranks:
        place = tuple(int(index[0]) for index in np.nonzero(grid == rank))
        assert layout.coordinates(rank) == dict(zip(axes, place, strict=True))
        assert layout.shard_of(rank) == place[0]
        for number, axis in enumerate(axes):
            along = tuple(slice(None) if number == other else index for other, index in enumerate(place))
            assert layout.peers(rank, axis) == tuple(grid[along].tolist())
    assert layout.axes == ("dp", *(axis for axis in axes[1:] if layout.sizes[axis] > 1))
    assert layout.representatives == tuple(grid[:, -1, 0, 0].tolist()), "the last stage, and the first of the others"


@pytest.mark.parametrize(("ranks", "text"), [((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2, 3, 9), "0,2-3,9"), ((), "")])
def test_ranks_are_written_as_ranges(ranks, text):
    assert format_ranks(ranks) == text


def test_a_cluster_has_a_rank():
    with pytest.raises(ValueError, match="world_size=0: must be at least 1"):
        Cluster(0)


def test_a_workflow_without_any_effect_is_refused():
    problem = refused(begin())
    assert problem.key == "nodes"
    assert "no node trains a role or has another effect" in problem.message


def test_columns_for_the_report_alone_do_not_travel():
    settings = {"batch": {"updates_per_step": 2}, "algorithm": {"kl": {"coefficient": 0.1}}}
    together = plan_of("grpo", 4, **settings)
    assert together["samples"].reads["old_log_probs"] == "old"
    apart = plan_of("grpo", 4, **settings, layout={"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2-3"}})
    assert "old_log_probs" not in apart["samples"].reads
    assert not [action for action in apart.chain(0) if str(action).startswith("reshard(old->")]
