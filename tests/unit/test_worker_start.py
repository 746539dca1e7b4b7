"""How the process of a worker starts."""

from __future__ import annotations

import gc

import pytest

from leaderless.run import worker


def test_workers_look_for_no_garbage_among_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = []
    monkeypatch.setattr(worker, "import_module", lambda name: imported.append((name, gc.isenabled())))
    made = [object, []]
    assert any(one is made for one in gc.get_objects())
    worker._import_for_good()
    assert imported == [("leaderless.worker.process", False)]
    assert gc.isenabled()
    assert not any(one is made for one in gc.get_objects()), "what is there is never inspected again"
