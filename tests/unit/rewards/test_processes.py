"""The processes that grade: how they start, end, and what they never import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.rewards.calls import (
    ROOT,
    grade,
    make_config,
    make_sample,
    own,
    reward_pids,
)

from leaderless.rewards import dispatcher
from leaderless.rewards.pool import RewardPool
from leaderless.rewards.registry import check_rewards


def test_start_begins_at_once_and_close_ends_all(rewards: RewardPool) -> None:
    others = reward_pids()
    pool = RewardPool(make_config({own("process_id"): 1.0, own("leave_thread"): {"weight": 0.0}}), 2)
    pool.start()
    pool.start()
    mine = reward_pids() - others
    assert len(mine) == 2
    assert {g.value for g in pool.grade([make_sample("")] * 64, [None] * 64)} <= mine
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 30.0
    assert reward_pids() == others


def test_ctrl_c_does_not_reach_reward_processes(capfd: pytest.CaptureFixture[str]) -> None:
    others = reward_pids()
    with RewardPool(make_config({own("process_id"): 1.0}), 2) as rewards:
        pids = reward_pids() - others
        for _ in range(20):
            for pid in pids:
                os.kill(pid, signal.SIGINT)
            time.sleep(0.02)
        graded = rewards.grade([make_sample("")] * 64, [None] * 64)
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        graded += rewards.grade([make_sample("")] * 64, [None] * 64)
        assert reward_pids() - others == pids
    assert {g.value for g in graded} <= pids
    assert "KeyboardInterrupt" not in capfd.readouterr().err


def test_processes_that_were_killed_are_replaced(rewards: RewardPool) -> None:
    others = reward_pids()
    with RewardPool(make_config({own("process_id"): 1.0}), 1) as mine:
        assert mine.grade([make_sample("")], [None])[0].is_valid
        (pid,) = reward_pids() - others
        os.kill(pid, signal.SIGKILL)
        graded = mine.grade([make_sample("")] * 5, [None] * 5)
    assert all(g.is_valid and g.value != pid for g in graded)


def test_an_interrupted_call_leaves_nothing_behind(rewards: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **settings: object) -> None:
        time.sleep(0.1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dispatcher, "wait", interrupt)
        before = reward_pids()
        with pytest.raises(KeyboardInterrupt):
            grade(rewards, "what_is_said", ["hang"])
        assert before
        assert before.isdisjoint(reward_pids())
    assert grade(rewards, "length", ["abc"])[0].value == 3.0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('no GPU here')", "cannot load the rewards: RecipeError.*no GPU here"),
        ("import os; os._exit(7)", "ended 4 times before they could grade a response"),
        ("import time; time.sleep(600)", "gave no sign of life for 1 s"),
    ],
)
def test_processes_that_cannot_start_are_an_error(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"reward_{abs(hash(code))}"
    guard = "import multiprocessing\nif multiprocessing.parent_process():\n    "
    (tmp_path / f"{module}.py").write_text(f"{guard}{code}\ndef reward(sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    if "sleep" in code:
        monkeypatch.setattr(dispatcher, "START_TIMEOUT_S", 1.0)
    monkeypatch.setattr(dispatcher, "_NOTICE_S", 0.1)
    config = make_config({f"{module}:reward": {"timeout_s": 0.5}})
    check_rewards(config)
    with RewardPool(config, 1) as rewards, pytest.raises(RuntimeError, match=message):
        rewards.grade([make_sample("")], [None])


def run_script(tmp_path: Path, code: str) -> subprocess.Popen[str]:
    """A worker whose main module has no `if __name__ == "__main__"` and is expensive to import."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\n"
        "MARK = 'main was imported'\n"
        "from leaderless.config.rewards import RewardsConfig\n"
        "from leaderless.rewards.pool import RewardPool\n"
        "from leaderless.rewards.protocol import RewardInput\n"
        "sample = RewardInput('', 'abc', 'abc', {}, False)\n"
        f"name = 'tests.unit.reward_functions:'\n{code}"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_reward_processes_import_neither_torch_nor_the_main_module_and_print_to_standard_error(tmp_path: Path) -> None:
    script = run_script(
        tmp_path,
        "rewards = {name + 'chatter': 1.0, name + 'loaded_modules': 1.0, 'math': 1.0, 'exact_match': 1.0}\n"
        "pool = RewardPool(RewardsConfig.model_validate(rewards), 1)\n"
        "graded = pool.grade([sample], [None])\n"
        "print(graded[0].details[name + 'loaded_modules']['answer'])\n"
        "print([module for module in ('torch', 'transformers') if module in sys.modules])\n"
        "import multiprocessing\n"
        "multiprocessing.active_children()[0].kill()\n"
        "pool.close()\n",
    )
    output, errors = script.communicate(timeout=60)
    assert output.splitlines() == ["None", "[]"]
    assert "said by a reward" in errors
    assert "said by a library" in errors
    assert script.returncode == 0


def test_reward_processes_end_with_their_worker(tmp_path: Path) -> None:
    script = run_script(
        tmp_path,
        "rewards = {name + 'what_is_said': {'timeout_s': 600}, name + 'leave_thread': {'sources': ['first']}}\n"
        "pool = RewardPool(RewardsConfig.model_validate(rewards), 1)\n"
        "pool.grade([RewardInput('', 'one', None, {}, False)], ['first'])\n"
        "import multiprocessing\n"
        "print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "pool.grade([RewardInput('', 'hang in c', None, {}, False)], [None])\n",
    )
    assert script.stdout is not None
    child = int(script.stdout.readline())
    time.sleep(0.3)
    os.kill(child, 0)
    script.kill()
    script.wait()
    end = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
    script.stdout.close()


def test_importing_and_trying_rewards_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    data = {"train": {"path": str(tmp_path / "rows.jsonl"), "answer": "answer"}}
    recipe = {"name": "a", "workflow": "grpo", "models": {}, "data": data, "reward": {"exact_match": 1}, "steps": 1}
    modules = sorted(path.stem for path in (ROOT / "src/leaderless/rewards").glob("*.py") if path.stem != "__init__")
    assert {"math_reward", "pool", "protocol"} <= set(modules)
    imports = ", ".join(f"leaderless.rewards.{module}" for module in modules)
    code = (
        f"import sys, {imports}\nfrom leaderless.config import Recipe\n"
        f"print([t.reward for t in leaderless.rewards.dry_run.try_rewards(Recipe.model_validate({recipe!r}), 1)])\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["[1.0, 0.0]", "[]"]
