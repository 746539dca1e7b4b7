"""A stand-in for Isaac Lab: a simulation of points on a line, with the interface of `ManagerBasedRLEnv`.

As there, a step resets the episodes that are over before it observes, and all episodes step together.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch

STEPS = 6


class Simulation(gymnasium.Env):
    """Points that actions move; beyond 1 the task is done."""

    def __init__(self, cfg):
        self.num_envs, self.device, self.cfg = cfg.num_envs, torch.device(cfg.device), cfg
        self.single_observation_space = {"policy": gymnasium.spaces.Box(-np.inf, np.inf, (2,))}
        self.single_action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
        self.max_episode_length = STEPS
        self.place, self.length = torch.zeros(cfg.num_envs), torch.zeros(cfg.num_envs, dtype=torch.long)
        self.is_done = torch.zeros(cfg.num_envs, dtype=torch.bool)
        terms = ["time_out", *(["success"] if cfg.has_success else [])]
        self.termination_manager = SimpleNamespace(
            active_terms=terms, get_term=lambda name: {"success": self.is_done}[name]
        )
        self.num_closed = self.num_resets = 0

    def _seen(self):
        noise = torch.randn(self.num_envs) if self.cfg.observations.policy.enable_corruption else 0
        return {"policy": torch.stack([self.place + noise, self.length.float()], dim=1)}

    def reset(self, seed=None, env_ids=None):
        torch.manual_seed(seed)
        self._reset_idx(env_ids)
        return self._seen(), {}

    def _reset_idx(self, env_ids):
        self.num_resets += len(env_ids)
        self.place[env_ids] = torch.rand(len(env_ids)) - 0.5
        self.length[env_ids] = 0

    def step(self, action):
        assert action.shape == (self.num_envs, 1)
        assert action.device == self.device
        self.place += 0.4 * action[:, 0]
        self.length += 1
        self.is_done = self.place > 1
        terminated, time_outs = self.is_done.clone(), self.length >= self.max_episode_length
        reward = self.place.clone()
        over = (terminated | time_outs).nonzero().squeeze(-1)
        if len(over):
            self._reset_idx(over)
        return self._seen(), reward, terminated, time_outs, {}

    def close(self):
        self.num_closed += 1


def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install the stand-in; returns what is launched."""
    launched: list[str] = []

    class AppLauncher:
        def __init__(self, *, headless):
            launched.append(f"headless={headless}")
            self.app = self

    def parse_env_cfg(name, *, device, num_envs):
        assert launched, "the application starts before"
        gymnasium.spec(name)
        policy = SimpleNamespace(enable_corruption=True, history_length=3 if "History" in name else None)
        has_success = "Reach" in name
        return SimpleNamespace(
            device=device, num_envs=num_envs, has_success=has_success, observations=SimpleNamespace(policy=policy)
        )

    for name, content in {
        "isaaclab": {},
        "isaaclab.app": {"AppLauncher": AppLauncher},
        "isaaclab_tasks": {},
        "isaaclab_tasks.utils": {"parse_env_cfg": parse_env_cfg},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("Isaac-Reach-Franka-v0", "Isaac-Lift-v0", "Isaac-History-v0"):
        if name not in gymnasium.registry:
            gymnasium.register(name, Simulation, disable_env_checker=True, order_enforce=False)
    return launched
