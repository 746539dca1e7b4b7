"""What `leaderless plan` says of the memory of a run with the sizes that are measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_machine import SIBLINGS, Machine
from leaderless.planner import Cluster, make_plan
from leaderless.planner.memory.estimate import estimate_memory, plan_pool
from leaderless.planner.memory.rank import DeviceMemory, Room
from leaderless.planner.workflow import load_recipe, resolve_workflow


class Planned(NamedTuple):
    """The estimate of `plan`, and the tokens of the engine's pool."""

    memory: DeviceMemory
    pool_tokens: int

    @property
    def held(self) -> tuple[str, ...]:
        """Parts that a trainer has, and an engine without one has not."""
        return tuple(name for name in self.memory.resident if name.startswith("policy "))

    def allocated(self, phase: str, *, without: Sequence[str] = ()) -> int:
        """What torch allocates of it in a phase: memory of the driver is none of it."""
        left_out = {"driver", "communication", "libraries", "checkpoint copy", "files being written", *without}
        resident = sum(size for name, size in self.memory.resident.items() if name not in left_out)
        return resident + sum(self.memory.phases[phase].values())


def planned_memory(machine: Machine, folder: str) -> Planned:
    """The estimate of `plan` for a run that trains this model with passes of this size."""
    preset = machine.preset
    recipe = {
        "name": "gpu",
        "workflow": "grpo",
        "models": {"policy": {"path": folder, "compute_dtype": machine.config_dtype}},
        "data": {
            "train": {"path": "rows.jsonl", "prompt": "p", "answer": "a"},
            "max_prompt_tokens": preset.prompt_tokens,
        },
        "batch": {
            "prompts_per_step": preset.prompts,
            "responses_per_prompt": SIBLINGS,
            "micro_batch_tokens": preset.pass_tokens,
        },
        "rollout": {
            "max_response_tokens": preset.response_tokens,
            "max_sequences": preset.prompts * SIBLINGS,
            "engine": "native",
        },
        "reward": {"exact_match": 1.0},
        "steps": 1,
    }
    with tempfile.TemporaryDirectory(prefix="gpu-plan-") as own:  # parts share the folder of the model
        path = Path(own) / "recipe.yaml"
        path.write_text(json.dumps(recipe), encoding="utf-8")
        loaded = load_recipe(path, ()).recipe
    plan = make_plan(loaded, resolve_workflow(loaded.workflow), Cluster(1))
    room = Room(keeps="weights", max_logits=preset.max_logits)
    memory = estimate_memory(loaded, plan, preset.pass_tokens, room=room)
    pool = plan_pool(loaded, plan.instances, plan.sizes, plan.instances[0], room.cache)
    assert memory is not None
    assert pool is not None
    return Planned(memory.cpu if machine.device.type == "cpu" else memory.accelerator, pool.tokens)
