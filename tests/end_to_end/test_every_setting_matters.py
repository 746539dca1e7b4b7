"""Every setting of a recipe is read by the code that it is meant for."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from unittest.mock import patch

import datasets
from pydantic import BaseModel
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import ROOT, command
from tests.tiny import tiny_model, write_additions, write_recipe
from tests.unit.config.test_config_schema import all_sections

from leaderless.algorithms.settings import (
    CorrectionConfig,
    RewardModelConfig,
    SacConfig,
    TeacherServerConfig,
    TeamConfig,
)
from leaderless.base.section import Section
from leaderless.config.environment import McpServerConfig, OnlineConfig
from leaderless.config.failures import FailuresConfig
from leaderless.config.judges import CriterionConfig, JudgeOptions, PairwiseConfig, ParseConfig, RewardOptions
from leaderless.config.layout import ChannelConfig, PlacementConfig
from leaderless.config.models import MegatronConfig
from leaderless.config.rewards import CodeOptions
from leaderless.config.rollout import ExternalConfig


def has_siblings(section: type[BaseModel]) -> bool:
    """Whether `type` selects this section among others; separate tests try each of them with each setting."""
    return "type" in section.model_fields and section is not CorrectionConfig


def watched_reads(folder: str, commands: list[list[str]], rows: list[dict[str, str]]) -> set[tuple[str, str]]:
    """Section and name of each setting that is read while commands run; checking a recipe does not count."""
    reads: set[tuple[str, str]] = set()

    def read(self: Section, name: str) -> object:
        if name in type(self).model_fields:
            frame = sys._getframe(1)
            module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            is_check = module.startswith("leaderless.config") and function.startswith("_")
            if module.startswith("leaderless.") and not is_check and function != "_check_inputs":
                reads.add((type(self).__name__, name))
        return object.__getattribute__(self, name)

    def hub(
        path: str, subset: str, split: str, *, streaming: bool = False
    ) -> datasets.Dataset | datasets.IterableDataset:
        assert (path, subset, split) == ("some/additions", "small", "held-out")
        dataset = datasets.Dataset.from_list(rows)
        return dataset.to_iterable_dataset() if streaming else dataset

    with patch.object(Section, "__getattribute__", read, create=True), patch.object(datasets, "load_dataset", hub):
        for arguments in commands:
            outcome = command(folder, arguments)
            assert outcome.code == 0, outcome.errors
    return reads


def test_every_setting_is_read_by_more_than_its_own_check(ranks: RankPool, tmp_path: Path) -> None:
    held_out = {"path": "some/additions", "subset": "small", "split": "held-out", "prompt": "question"}
    grpo = write_recipe(
        tmp_path,
        tiny_model(num_layers=1),
        {
            "data.evaluation": held_out | {"answer": "answer", "template": "plain"},
            "algorithm.kl": {"coefficient": 0.1, "target": 0.1},
            "algorithm.correction.type": "mask",
            "algorithm.overlong": {"buffer_tokens": 2, "filter": True},
            "batch.updates_per_step": 2,
            "reward": {
                "exact_match": {"weight": 1.0, "timeout_s": 9.0, "sources": []},
                "format": {"pattern": r".*\d.*"},
                "math": 0.0,
                "answer_match": 0.0,
                "search_format": 0.0,
            },
            "evaluation": {"every_steps": 1, "responses_per_prompt": 2, "temperature": 1.0, "top_p": 0.9},
            "layout": {"rollout": {"ranks": "0", "dp": 1}},
            "optimizer": {"schedule": "cosine", "final_fraction": 0.1},
            "checkpoint.best_metric": "policy/loss",
            "steps": 1,
        },
    )
    rows = [json.loads(line) for line in write_additions(tmp_path / "rows.jsonl", 4).read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"level": 1}) + "\n" for row in rows))
    own_optimizer = "roles.policy.optimizer={learning_rate: 0.5}"
    columns = {"prompt": "question", "answer": "answer", "template": "plain"}
    stream = held_out | columns | {"streaming": True}
    mixture = {
        "stream": stream | {"weight": 2.0},
        "file": columns | {"path": str(tmp_path / "rows.jsonl"), "curriculum": {"column": "level"}},
    }
    sft = [
        "guards.grad_norm_limit=1e-9",
        "guards.grad_norm_action=warn",
        "workflow=sft",
        "data.max_response_tokens=2",
        "evaluation.every_steps=0",
    ]
    sft.append(f"data.train={json.dumps(stream | {'response': 'answer'})}")
    sft.append(f"models.policy={json.dumps({'path': tiny_model(num_layers=1), 'lora': {'rank': 2}})}")
    pairs = {"path": str(tmp_path / "pairs.jsonl"), "chosen": "answer", "rejected": "question", "prompt": "question"}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row | {"gap": 1}) + "\n" for row in rows))
    singles = {"path": str(tmp_path / "singles.jsonl"), "response": "answer", "desirable": "good", "prompt": "question"}
    (tmp_path / "singles.jsonl").write_text("".join(json.dumps(row | {"good": True}) + "\n" for row in rows))
    preferences = ["layout={}", "evaluation.every_steps=0", "data.max_response_tokens=8"]
    shown = {"template": "{prompt}{answer}", "max_prompt_tokens": 12}
    taught = {"divergence": "jensen_shannon", "beta": 0.3, "top_k": 3, "teacher": "policy", "align": "text"}
    taught["context"] = shown
    commands = [
        [
            "train",
            str(grpo),
            "name=gkd",
            "workflow=gkd",
            f"algorithm={json.dumps({'distillation': taught})}",
            "layout={}",
            "evaluation.every_steps=0",
        ],
        [
            "train",
            str(grpo),
            "name=dpo",
            "workflow=dpo",
            f"data.train={json.dumps({'one': pairs})}",
            *preferences,
            f"data.evaluation={json.dumps(pairs)}",
            "evaluation.every_steps=1",
        ],
        ["train", str(grpo), "name=kto", "workflow=kto", f"data.train={json.dumps(singles)}", *preferences],
        ["train", str(grpo)],
        ["train", str(grpo), "name=imitate", "layout={}", own_optimizer, *sft],
        [
            "train",
            str(grpo),
            "name=ppo",
            "workflow=ppo",
            "layout={}",
            "evaluation.every_steps=0",
            f"data.train={json.dumps(mixture)}",
        ],
        [
            "train",
            str(grpo),
            "name=dapo",
            "workflow=dapo",
            "algorithm.repeat.max_rounds=1",
            "layout={}",
            "evaluation.every_steps=0",
        ],
        ["plan", str(grpo)],
        [
            "train",
            str(grpo),
            "name=schedule",
            "layout={}",
            "steps=5",
            "evaluation.every_steps=0",
            "schedule={replan_every_steps: 1, layouts: {same: {policy: {ranks: 0}}}}",
        ],
    ]
    (reads,) = ranks.run(1, watched_reads, str(tmp_path), commands, rows, init_group=False, deadline_s=600)
    # Rewards are graded in separate processes, where nothing is watched; other tests show the effect of these settings.
    elsewhere = {("ExactMatchOptions", "ignore_case"), ("FormatOptions", "pattern")}
    elsewhere |= {("CodeOptions", name) for name in CodeOptions.model_fields}
    builtin = ("AnswerMatchOptions", "ExactMatchOptions", "FormatOptions", "MathOptions", "SearchFormatOptions")
    elsewhere |= {(options, "timeout_s") for options in builtin}
    # These are read when a guard has found something; see test_guards.py.
    elsewhere |= {
        ("GuardsConfig", name) for name in ("non_finite_loss", "non_finite_gradient", "max_skips", "max_roll_backs")
    }
    # Engines in other processes are not part of these runs; tests/unit/rollout/test_make_engine.py tries each setting.
    elsewhere |= {("ExternalConfig", name) for name in ExternalConfig.model_fields}
    # Weights of 4 bits need bitsandbytes; tests/unit/models/test_nf4.py tries blocks.
    elsewhere |= {("LoraConfig", "base_block")}
    # Megatron is not part of these runs; tests/unit/training/test_megatron.py tries each setting.
    elsewhere |= {("MegatronConfig", name) for name in MegatronConfig.model_fields}
    # Channels need two pools; tests/unit/worker/test_channels.py and test_continuous.py try each setting.
    elsewhere |= {("ChannelConfig", name) for name in ChannelConfig.model_fields} | {("RunConfig", "follow")}
    # So do weights that travel; test_weight_differences.py tries each form.
    elsewhere |= {("RolloutConfig", "weights")}
    # Automatic placement needs a profile; tests/unit/planner/test_placement.py tries each setting.
    elsewhere |= {("PlacementConfig", name) for name in PlacementConfig.model_fields}
    # Servers of tools are not part of these runs; tests/unit/environments/test_tool_sources.py tries each setting.
    elsewhere |= {("McpServerConfig", name) for name in McpServerConfig.model_fields}
    # Online runs need clients; test_online.py and tests/unit/serving/online try each setting.
    elsewhere |= {("OnlineConfig", name) for name in OnlineConfig.model_fields}
    # SAC needs a body; tests/unit/embodied/test_sac.py and test_sac.py have them.
    elsewhere |= {("SacConfig", name) for name in SacConfig.model_fields}
    # Judges need a server, or another model; tests/unit/rewards/test_judges.py and test_judge_plan.py try each setting.
    judges = (JudgeOptions, CriterionConfig, ParseConfig, PairwiseConfig)
    elsewhere |= {(section.__name__, name) for section in judges for name in section.model_fields}
    # So do teachers behind an address; tests/unit/stages/test_teacher_server.py tries each setting.
    elsewhere |= {("TeacherServerConfig", name) for name in TeacherServerConfig.model_fields}
    # A reward model is not part of these runs; test_reward_model.py tries each setting.
    elsewhere |= {("RewardModelConfig", name) for name in RewardModelConfig.model_fields}
    elsewhere |= {("AlgorithmConfig", "reward_model")}
    # Teams need an environment; test_team.py tries each setting.
    elsewhere |= {("TeamConfig", name) for name in TeamConfig.model_fields} | {("EnvironmentConfig", "agents")}
    # Read where a body learns by SAC; see test_sac.py.
    elsewhere |= {("SacConfig", name) for name in SacConfig.model_fields}
    # Failures need an environment; tests/unit/environments/test_failures.py and test_episode_failures.py cause them.
    elsewhere |= {("FailuresConfig", name) for name in FailuresConfig.model_fields}
    elsewhere |= {("Recipe", "workflow")}  # read before the recipe is one, as the workflow brings defaults
    elsewhere |= {("RunConfig", "tags")}  # read from the folder of the run; see test_cli_runs.py
    elsewhere |= {("RunConfig", "max_restarts")}  # read by the launcher of several workers; see test_restarts.py
    wanted = {
        (section.__name__, name)
        for section in all_sections() - {RewardOptions}
        for name in section.model_fields
        if section.__name__ != "RewardsConfig"  # read by name, all in one place
        and not has_siblings(section)
    }
    assert wanted - reads - elsewhere == set()
    assert len(wanted) > 80


def test_settings_that_only_reward_processes_read_are_read_there() -> None:
    rooms = [ROOT / "src/leaderless" / name for name in ("rewards", "sandbox")]
    texts = [path.read_text(encoding="utf-8") for room in rooms for path in room.rglob("*.py")]
    names = {node.attr for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    wanted = {"ignore_case", "pattern", *CodeOptions.model_fields, *JudgeOptions.model_fields, "opponents", "text"}
    planned = {"max_question_tokens"}  # the planner reads it
    assert wanted - {"prompt"} - planned - RewardOptions.model_fields.keys() <= names
