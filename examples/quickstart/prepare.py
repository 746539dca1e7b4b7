"""Makes the model and the data of the quickstart, as the first step of `leaderless quickstart` does."""

from __future__ import annotations

from pathlib import Path

from leaderless.cli.quickstart_project.data import write_additions

if __name__ == "__main__":
    write_additions(Path("runs/quickstart-data"))
