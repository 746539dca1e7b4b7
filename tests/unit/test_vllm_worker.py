"""Calls of vLLM by this package, with modules that stand in for it."""

from __future__ import annotations

import sys
from types import ModuleType
from unittest.mock import Mock

import pytest

from leaderless.rollout.apart.vllm_worker import VllmWorker, check_version

RELOAD = "vllm.model_executor.model_loader.reload"


def install(monkeypatch: pytest.MonkeyPatch, version: str, *names: str) -> None:
    """Replace vLLM by a stand-in of some version, with functions for loading weights."""
    for path in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader", RELOAD):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version, raising=False)
    for name in names:
        monkeypatch.setattr(sys.modules[RELOAD], name, Mock(), raising=False)


def test_a_version_of_vllm_that_lacks_something_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("initialize_layerwise_reload", "finalize_layerwise_reload")
    for version in ("0.32.0", "0.40.1+cu130", "1.0", "dev"):
        install(monkeypatch, version, *names)
        check_version()
    install(monkeypatch, "0.31.9", *names)
    with pytest.raises(RuntimeError, match=r"vLLM 0.31.9 is older than 0.32, .* its interpreter in rollout.external.p"):
        check_version()
    install(monkeypatch, "0.50.0", names[0])
    with pytest.raises(
        RuntimeError, match=r"vLLM 0.50.0 cannot load weights .*finalize_layerwise_reload.* rollout.ext"
    ):
        check_version()


@pytest.mark.parametrize(("keep_weights", "level"), [(True, 1), (False, 2)])
def test_weights_that_are_not_needed_again_are_not_copied_to_host_memory(keep_weights: bool, level: int) -> None:
    worker, engine = VllmWorker.__new__(VllmWorker), Mock()
    worker._llm, worker._is_on_accelerator, worker._open = engine, True, {"3"}
    worker.sleep(keep_weights=keep_weights)
    engine.abort_request.assert_called_once_with(["3"])
    engine.sleep.assert_called_once_with(level=level)
