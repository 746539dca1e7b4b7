"""A small environment, and what can be wrong with it."""

from __future__ import annotations

import json

import numpy as np

from leaderless.embodied.simulators.protocol import Continuous, Observations, Spaces, Steps, VectorEnvironment

LAST = 12


class Line(VectorEnvironment):
    """A point on a line, which actions and chance move; beyond 1 the episode ends. `fault` breaks one rule."""

    def __init__(self, num, *, fault=""):
        self.spaces = Spaces({"side": (2, 3)}, 2, Continuous((-1.0,), (1.0,)), LAST, has_instructions=True)
        self.fault, self.is_closed = fault, False
        self.places, self.steps = np.zeros(num), np.zeros(num, np.int64)
        self.seeds = [0] * num
        self.chance = [np.random.default_rng(0)] * num

    def reset(self, which, tasks, seeds):  # noqa: ARG002 - the protocol's
        for one, seed in zip(which, seeds, strict=True):
            self.seeds[one] = seed
            start = {"fixed": 0, "slot": seed + one}.get(self.fault, seed)
            self.chance[one] = np.random.default_rng(start)
            self.places[one], self.steps[one] = self.chance[one].uniform(-0.3, 0.3), 0
        if self.fault == "shared":
            self.places += 1e-9
            self.places[which] -= 1e-9
        return self.seen(which)

    def step(self, which, actions):
        num, chunk = actions.shape[:2]
        rewards, counts = np.zeros((num, chunk), np.float32), np.zeros(num, np.int64)
        over, cut = np.zeros(num, np.bool_), np.zeros(num, np.bool_)
        for row, one in enumerate(which):
            for place in range(chunk):
                self.places[one] += 0.1 * actions[row, place, 0] + self.chance[one].normal() * 0.02
                self.steps[one] += 1
                counts[row] += 1
                rewards[row, place] = self.places[one]
                over[row] = over[row] or abs(self.places[one]) > 1
                cut[row] = self.fault != "endless" and self.steps[one] >= LAST and not over[row]
                if self.fault == "both" and cut[row]:
                    over[row] = True
                if (over[row] or cut[row]) and self.fault != "runs_on":
                    break
            if (over[row] or cut[row]) and self.fault == "auto_reset":
                self.reset([one], [{}], [self.seeds[one]])
            if self.fault == "late_reward":
                rewards[row] = 1
        return Steps(self.seen(which), rewards, counts, over, cut, over)

    def seen(self, which):
        rows = np.array(sorted(which) if self.fault == "sorted" else which)
        state = np.stack([self.places[rows], self.steps[rows]], axis=1)
        if self.fault == "nan":
            state[0, 0] = np.nan
        shown = np.uint8(100 + 50 * np.clip(self.places[rows], -1, 1))
        images = np.broadcast_to(shown[:, None, None, None], (len(rows), 2, 3, 1 if self.fault == "gray" else 3))
        words = "" if self.fault == "silent" else "go right"
        kind = np.float64 if self.fault == "float64" else np.float32
        return Observations({"side": images}, state.astype(kind), (words,) * len(rows))

    def save(self, which):
        if self.fault == "no_save":
            return super().save(which)
        return [self.saved(one) for one in which]

    def saved(self, one):
        chance = self.chance[one].bit_generator.state
        return json.dumps([self.places[one], int(self.steps[one]), chance]).encode()

    def restore(self, which, states):
        for one, state in zip(which, states, strict=True):
            self.places[one], self.steps[one], chance = json.loads(state)
            self.chance[one] = np.random.default_rng(0)
            if self.fault != "forgets_chance":
                self.chance[one].bit_generator.state = chance
        return self.seen(which)

    def expert(self, which):
        if self.fault == "no_expert":
            return super().expert(which)
        return np.ones((len(which), 1), np.float64 if self.fault == "double_expert" else np.float32)

    def close(self):
        if self.is_closed and self.fault == "closes_once":
            raise RuntimeError("it was closed")
        self.is_closed = True
