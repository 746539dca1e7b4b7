"""`leaderless stop` ends a run after its step, with a checkpoint, and the next start continues."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.end_to_end.alone import run_alone
from tests.end_to_end.cli import metrics
from tests.tiny import tiny_model, write_recipe


def test_a_run_that_is_asked_to_stop_ends_with_a_checkpoint_and_continues(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), {"steps": 100_000, "run.status_every_s": 0.05})
    folder, ended = tmp_path / "runs/tiny", threading.Event()

    def ask() -> None:
        while not ended.wait(0.05):
            if (folder / "metrics.jsonl").exists():
                (folder / "stop").touch()

    asking = threading.Thread(target=ask)
    asking.start()
    outcome = run_alone(tmp_path, "train", recipe)
    ended.set()
    asking.join()
    assert outcome.code == 143, outcome
    assert outcome.output.count("stopping after this step, with a checkpoint; press Ctrl-C again") == 1
    last = len(metrics(folder))
    assert (folder / f"checkpoints/step-{last:06d}/state.json").exists()
    outcome = run_alone(tmp_path, "train", recipe, f"steps={last + 1}")
    assert outcome.code == 0, outcome.errors
    assert not (folder / "stop").exists()
    assert not (folder / "live").exists()
    outcome = run_alone(tmp_path, "stop", folder)
    assert outcome.code == 0
    assert (folder / "stop").exists()
    assert run_alone(tmp_path, "stop", tmp_path).code == 2
