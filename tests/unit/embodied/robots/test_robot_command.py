"""`leaderless robot` as a person uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leaderless.cli.main import app
from leaderless.config import RecipeError

ROOT = Path(__file__).parents[4]


def run(*arguments: str) -> str:
    """What a command prints."""
    result = CliRunner().invoke(app, ["robot", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return " ".join(result.stdout.split())


def test_a_person_releases_and_stops_an_arm_at_its_server(monkeypatch):
    monkeypatch.setenv("LEADERLESS_TOKEN", "secret")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    options = ["--port", "0", "--option", "is_simulated=false", "--option", "max_steps=4"]
    server = subprocess.Popen(
        [sys.executable, "-m", "leaderless", "robot", "serve", "dummy", *options],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        address = server.stdout.readline().split(" at ")[1].split(";")[0]
        assert "type 'release'" in server.stdout.readline()
        with pytest.raises(RecipeError, match="a person at its server has to release it"):
            run("try", address)
        server.stdin.write("release\n")
        server.stdin.flush()
        assert server.stdout.readline() == "released\n"
        shown = run("try", address, "--policy", "random")
        assert "step 4: at (" in shown
        assert "end" in shown
        assert f"the arm at {address} is stopped" in run("stop", address, "--reason", "enough")
        with pytest.raises(RecipeError, match="stopped: enough"):
            run("try", address)
        monkeypatch.delenv("LEADERLESS_TOKEN")
        with pytest.raises(RecipeError, match="the token is missing or wrong"):
            run("stop", address)
    finally:
        server.terminate()
        try:
            _, error = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 143
    assert not error


def test_options_that_are_none_are_refused():
    with pytest.raises(RecipeError, match="'camera' must be key=value"):
        run("serve", "dummy", "--port", "0", "--option", "camera")
    with pytest.raises(RecipeError, match="num_axes=9 must be from 1 to 4"):
        run("serve", "dummy", "--port", "0", "--option", "num_axes=9")
    with pytest.raises(RecipeError, match="can be reached from other machines, so clients need a token"):
        run("serve", "dummy", "--host", "0.0.0.0", "--port", "0")
