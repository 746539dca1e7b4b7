"""Available memory, and what happens to a run that needs more."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from tests.unit.recipes import make_recipe, plan_of, write_model
from torch import Tensor

from leaderless.config import RecipeError
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner.memory.estimate import estimate_memory
from leaderless.planner.memory.fit import MARGIN, fit_plan
from leaderless.planner.memory.limits import MAX_LOGITS
from leaderless.planner.memory.rank import LARGE_MAX_LOGITS, Room, format_bytes
from leaderless.worker.build import memory_bounds
from leaderless.worker.build.memory_bounds import MemoryBounds, available_memory, check_memory
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.supervision.settled_memory import lower_limit, read_limits

CPU = torch.device("cpu")
GIB = 1 << 30


class Pair:
    """Two ranks, with separate memory for the other one."""

    def __init__(self, others: float) -> None:
        self.others = torch.tensor([others, others, 2], dtype=torch.float64)

    def max(self, values: Tensor, _what: str) -> Tensor:
        return torch.maximum(values, -self.others)


class Ranks:
    """A process group as one of its ranks sees it, where the other ranks contribute a number."""

    def __init__(self, rank: int, size: int, others: int = -1) -> None:
        self.rank, self.size, self.others = rank, size, others

    def max(self, values: Tensor, _what: str) -> Tensor:
        return values.clamp(min=self.others)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def limit(folder: Path, most: str, names: tuple[str, str], stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(most)
    (folder / names[1]).write_text(str(2 * GIB))
    (folder / "memory.stat").write_text(stat)


def test_ranks_share_what_the_machine_has_left(root: Path) -> None:
    there = psutil.virtual_memory().available
    assert available_memory(CPU, 4, root) == pytest.approx(there / 4, rel=0.1)


def test_the_limit_of_a_control_group_counts_without_what_it_caches(root: Path) -> None:
    names = ("memory.max", "memory.current")
    (root / "proc/self/cgroup").write_text("0::/pod/worker\n")
    limit(root / "sys/fs/cgroup/pod/worker", "max", names, "")
    limit(root / "sys/fs/cgroup/pod", str(2 * GIB + 900), names, "anon 7\ninactive_file 100\n")
    assert available_memory(CPU, 2, root) == 500
    limit(root / "sys/fs/cgroup/pod", str(GIB), names, "inactive_file 0\n")
    assert available_memory(CPU, 2, root) == 0, "it is over its limit"


def test_control_groups_of_the_first_version_are_read_too(root: Path) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (root / "proc/self/cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/docker/1\n")
    # Inside a container, its own group is mounted in the place of the root.
    limit(root / "sys/fs/cgroup/memory", str(2 * GIB + 300), names, "total_inactive_file 100\n")
    assert available_memory(CPU, 1, root) == 400


def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: int, others: int, **sections: object) -> list[str]:
    """The message to the user if one of two ranks has less memory than the other."""
    monkeypatch.setattr(memory_bounds, "available_memory", lambda *_: mine)
    settings = {"models": {"policy": write_model(tmp_path / "model")}, **sections}
    recipe, shown = make_recipe(**settings), list[str]()
    check_memory(recipe, plan_of("grpo", 2, **settings), RankInfo(0, 2, 0, 2), CPU, Pair(others), shown.append)  # type: ignore[arg-type]
    return shown


def test_the_rank_with_the_least_memory_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(tmp_path, monkeypatch, 8 * GIB, 8 * GIB) == []
    for mine, others in ((GIB >> 3, 8 * GIB), (8 * GIB, GIB >> 3)):
        with pytest.raises(
            RecipeError, match=r"^run.memory_check: a rank needs at least .* 128 MiB for it: set checkp"
        ):
            check(tmp_path, monkeypatch, mine, others)


def test_pools_divide_the_memory_of_a_machine_as_they_need_it(tmp_path: Path) -> None:
    layout = {"rollout": {"ranks": "0"}, "advantage": {"ranks": "1"}, "policy": {"ranks": "1"}}
    settings = {"models": {"policy": write_model(tmp_path / "model")}, "layout": layout}
    recipe, plan = make_recipe(**settings), plan_of("grpo", 2, **settings)

    def needs(rank: int) -> int:
        tokens = plan.batch.micro_batch_tokens
        estimate = estimate_memory(recipe, plan, tokens, among=(rank,))
        assert estimate is not None
        return estimate.cpu.peak

    less, more = sorted([needs(0), needs(1)])
    assert more > 1.2 * less
    both = less + more
    fit = fit_plan(recipe, plan, both // 2 + 1, is_cpu=True, per_machine=2)
    assert not fit.is_hopeless
    assert f"there are {format_bytes(more)}" in fit.problem, "within the margin"
    assert not fit_plan(recipe, plan, int(both / 2 / MARGIN) + 2, is_cpu=True, per_machine=2).problem
    assert fit_plan(recipe, plan, both // 2, is_cpu=True).problem, "each on a machine of its own"
    assert MemoryBounds(both, is_cpu=True, pass_tokens=8, per_machine=2).fits(recipe, plan)


def test_ranks_keep_whole_what_fits_on_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"models": {"policy": {"path": write_model(tmp_path / "model"), "compute_dtype": "bfloat16"}}}
    recipe, plan = make_recipe(**settings), plan_of("grpo", 2, **settings)
    assert plan.memory is not None
    enough = int(plan.memory.accelerator.peak / MARGIN) + 1

    def keeps(mine: int, others: int) -> str:
        monkeypatch.setattr(memory_bounds, "available_memory", lambda *_: mine)
        device, place = torch.device("cuda", 0), RankInfo(0, 2, 0, 2)
        bounds = check_memory(recipe, plan, place, device, Pair(others), lambda _: None)  # type: ignore[arg-type]
        return bounds.room.keeps

    assert keeps(64 * GIB, 64 * GIB) == "all"
    assert keeps(64 * GIB, enough) == keeps(enough, 64 * GIB) == "nothing"


def test_a_run_that_cannot_fit_may_be_tried_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = check(tmp_path, monkeypatch, GIB >> 3, GIB, run={"memory_check": "warn"})
    assert "memory may run out" in shown


def test_a_run_that_only_just_fits_begins_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections: dict[str, object] = {"batch": {"prompts_per_step": 512}}
    estimate = plan_of("grpo", 2, models={"policy": write_model(tmp_path / "model")}, **sections).memory
    assert estimate is not None
    assert check(tmp_path, monkeypatch, estimate.cpu.peak * 5 // 4, 8 * GIB, **sections) == []
    (shown,) = check(tmp_path, monkeypatch, estimate.cpu.peak * 11 // 10, 8 * GIB, **sections)
    assert "a rank needs about" in shown
    assert "lower batch.micro_batch_tokens=16384" in shown or "lower rollout.max_sequences=256" in shown


FREED = """
from pathlib import Path
from leaderless.base.devices import trim_host_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
bytearray(24 << 20)  # once a block of this size has been freed, glibc takes the next ones from its heap
blocks = [bytearray(b"x") * (24 << 20) for _ in range(8)]
last = bytearray(1 << 16)  # lies behind them, so that the heap cannot shrink by itself
blocks.clear()
before = resident()
trim_host_memory()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed blocks, and gives them back")
def test_freed_weights_go_back_to_the_system() -> None:
    output = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True).stdout
    assert int(output) > 100 << 20


def test_what_is_kept_whole_stays_as_it_was_when_the_run_began(tmp_path: Path) -> None:
    directory, much, little = RunDirectory(tmp_path), Room("all", LARGE_MAX_LOGITS), Room()
    bounds = MemoryBounds(GIB, is_cpu=False, pass_tokens=8, room=much)
    less = replace(bounds, room=little)
    assert bounds.as_begun(directory, Ranks(0, 2)).room == much
    lower_limit(directory, "policy", 512)
    assert less.as_begun(directory, Ranks(0, 2)).room == much
    assert less.as_begun(directory, Ranks(1, 2, others=2)).room == Room("all", 2), "as rank 0 has read"
    assert less.as_begun(directory, Ranks(0, 4)).room == little, "other ranks have other memory"
    assert bounds.as_begun(directory, Ranks(0, 4)).room == little
    assert read_limits(directory) == {"policy": 512}
    assert replace(bounds, is_cpu=True).as_begun(directory, Ranks(0, 2)).room == much
    directory.limits.write_text('{"keep_whole": {"2": "weights"}}')  # of a run that began with an earlier version
    assert bounds.as_begun(directory, Ranks(0, 2)).room == Room("weights", MAX_LOGITS)
