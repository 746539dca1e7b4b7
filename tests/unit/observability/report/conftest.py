"""Runs for reports."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.unit.observability.report.runs import write_run


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "template")


@pytest.fixture
def run(template, tmp_path) -> Path:
    """A healthy run that a test may damage."""
    return Path(shutil.copytree(template, tmp_path / "run"))
