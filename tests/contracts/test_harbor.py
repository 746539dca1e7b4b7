"""Tasks in Harbor's format as the package reads them: `make test-harbor`, with Python 3.12 or newer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from leaderless.environments.adapters.harbor_folder import HarborTask, read_tasks

TASKS = Path(__file__).parents[1] / "unit/environments/harbor"
pytestmark = pytest.mark.skipif(find_spec("harbor") is None, reason="no package harbor: make test-harbor")


@pytest.mark.parametrize("task", list(read_tasks(TASKS)), ids=lambda task: task.name)
def test_the_package_reads_a_task_as_we_do(task: HarborTask) -> None:
    from harbor.models.task.task import Task

    theirs = Task(task.folder)
    assert theirs.instruction == task.instruction
    assert theirs.config.verifier.timeout_sec == task.number("verifier", "timeout_sec", 0.0)
    assert theirs.config.agent.timeout_sec == task.number("agent", "timeout_sec", 0.0)
    assert theirs.config.environment.cpus == task.table("environment").get("cpus")
    assert theirs.paths.discovered_test_path == task.folder / "tests/test.sh"
    assert theirs.paths.discovered_solve_path == task.folder / "solution/solve.sh"
    assert not theirs.has_steps


def test_rewards_are_where_the_package_looks_for_them() -> None:
    from harbor.models.trial.paths import EnvironmentPaths

    from leaderless.environments.adapters.harbor_tasks import _REWARDS

    paths = EnvironmentPaths()
    assert (str(paths.reward_json_path), str(paths.reward_text_path)) == _REWARDS
    assert (str(paths.tests_dir), str(paths.solution_dir)) == ("/tests", "/solution")
