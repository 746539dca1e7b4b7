"""Which packages are there."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from leaderless.base import versions


def test_packages_that_are_missing_or_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["torch>=2.11,<2.14", "transformers>=5.17", "numpy>=2", "mlflow; extra == 'mlflow'"]
    found = {"torch": "2.13.0+cpu", "transformers": "5.10.1"}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(versions, "requires", lambda _: needed)
    monkeypatch.setattr(versions, "version", version)
    wrong = list(versions.unfit_versions())
    assert wrong == ["transformers is 5.10.1, but must be >=5.17", "numpy is missing"]


def test_a_source_tree_that_is_not_installed_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "requires", requires)
    assert not list(versions.unfit_versions())
