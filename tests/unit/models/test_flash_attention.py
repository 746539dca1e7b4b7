"""FlashAttention-3 is used where it is installed, on all ranks, and right; kernels and devices are stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tests.unit.models.test_shared_prompts import varlen_of_torch_2_11
from tests.unit.recipes import plan_of
from torch import Tensor
from torch.nn import attention

from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention import flash, shared_prompts
from leaderless.models.attention.flash import activate_flash_attention_3
from leaderless.worker.build import accelerator as worker_attention
from leaderless.worker.build.accelerator import choose_attention

CPU = torch.device("cpu")
HEADS = [(4, 2, 16), (3, 3, 8)]
CUDA = cast("torch.device", SimpleNamespace(type="cuda"))


class Torch:
    """Kernels, of which others may be active."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_installed: bool = True, generation: int = 9) -> None:
        self.active, self.kernels = "", varlen_of_torch_2_11
        self.other: Callable[..., Tensor] = varlen_of_torch_2_11
        monkeypatch.setattr(flash, "find_spec", lambda name: object() if is_installed else None)  # noqa: ARG005
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (generation, 0))
        monkeypatch.setattr(attention, "activate_flash_attention_impl", self.activate, raising=False)
        monkeypatch.setattr(attention, "restore_flash_attention_impl", self.restore, raising=False)
        monkeypatch.setattr(shared_prompts, "varlen_attn", self.attend)

    def attend(self, *args: Tensor, **options: object) -> Tensor:
        return self.kernels(*args, **options)  # type: ignore[arg-type]

    def activate(self, impl: str) -> None:
        self.active, self.kernels = impl, self.other

    def restore(self) -> None:
        self.active, self.kernels = "", varlen_of_torch_2_11


def test_the_functions_of_torch_are_called_as_they_are_declared() -> None:
    activate = getattr(attention, "activate_flash_attention_impl", None)
    if activate is None:
        pytest.skip("this torch has one implementation only")
    signature(activate).bind("FA3")
    signature(attention.restore_flash_attention_impl).bind()
    assert "FA3" in attention.list_flash_attention_impls()


def test_it_is_used_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Torch(monkeypatch)
    assert activate_flash_attention_3(CPU, HEADS) is None
    assert kernels.active == "FA3"
    assert activate_flash_attention_3(CPU, []) is None, "the models are unknown"


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"is_installed": False}, ""), ({"generation": 8}, "it is for processors of compute capability 9.0")],
)
def test_it_is_not_touched_where_it_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, int], reason: str
) -> None:
    kernels = Torch(monkeypatch, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "activate", lambda _: pytest.fail("it is not there"))
    assert activate_flash_attention_3(CPU, HEADS) == reason


def test_an_older_torch_has_one_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    Torch(monkeypatch)
    monkeypatch.delattr(attention, "activate_flash_attention_impl")
    assert activate_flash_attention_3(CPU, HEADS) == ""


def test_the_kernels_of_torch_are_restored_after_a_trial_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Torch(monkeypatch)

    def wrong(*args: Tensor, **options: object) -> Tensor:
        return 1.1 * varlen_of_torch_2_11(*args, **options)  # type: ignore[arg-type]

    def lacking(*_: Tensor, **__: object) -> Tensor:
        raise RuntimeError("no kernel for heads of 16\nsee the page")

    def bad(*args: Tensor, **options: object) -> Tensor:
        return torch.nan * varlen_of_torch_2_11(*args, **options)  # type: ignore[arg-type]

    for other, reason in ((wrong, "a trial of it differs by 0.1"), (lacking, "no kernel"), (bad, "differs by nan")):
        kernels.other = other
        found = activate_flash_attention_3(CPU, HEADS)
        assert found is not None
        assert reason in found
        assert "\n" not in found
        assert kernels.active == ""


class Ranks(ProcessGroup):
    """A rank of two."""

    def __init__(self, rank: int, *, other_lacks: bool) -> None:
        super().__init__((0, 1), rank)
        self.other_lacks = other_lacks

    def max(self, values: Tensor, what: str) -> Tensor:
        assert what == "whether ranks use FlashAttention-3"
        return values.clamp(min=int(self.other_lacks))


@pytest.mark.parametrize(
    ("mine", "other_lacks", "shown", "is_restored"),
    [
        (None, False, ["attention: FlashAttention-3"], False),
        (None, True, [], True),
        ("", False, [], False),
        ("it is old", True, ["attention: torch's own kernels, as FlashAttention-3 cannot be used: it is old"], False),
    ],
)
def test_all_ranks_use_it_or_none(
    monkeypatch: pytest.MonkeyPatch, mine: str | None, other_lacks: bool, shown: list[str], is_restored: bool
) -> None:
    restored, said = list[bool](), list[str]()
    monkeypatch.setattr(worker_attention, "activate_flash_attention_3", lambda *_: mine)
    monkeypatch.setattr(worker_attention, "restore_flash_attention", lambda: restored.append(True))
    plan = plan_of("grpo", 2)
    choose_attention(plan, CUDA, Ranks(0, other_lacks=other_lacks), said.append)
    assert said == shown
    assert bool(restored) == is_restored
    choose_attention(plan, CPU, Ranks(0, other_lacks=True), pytest.fail)
    choose_attention(plan, CUDA, Ranks(1, other_lacks=other_lacks), said.append)
    assert said == shown * (1 + (mine == "it is old")), "who cannot, and else the first"
