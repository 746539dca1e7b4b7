"""Calls of vLLM by this package, with modules that stand in for it."""

from __future__ import annotations

import base64
import io
import math
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from tests.pictures import picture, prompt_with, reader_of

from leaderless.base.image_files import ORIENTATION, plain_file
from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.weights.buckets import PackedWeight, checksum
from leaderless.distributed.weights.stream import WeightStream
from leaderless.rollout.engine import Request, SamplingParams
from leaderless.rollout.external import vllm_engine
from leaderless.rollout.external.engine import ExternalEngine
from leaderless.rollout.external.vllm_engine import InProcessVllm
from leaderless.rollout.external.vllm_process import stages
from leaderless.rollout.external.vllm_process import worker as vllm_worker
from leaderless.rollout.external.vllm_process.loading import Loading, UnseenCopies
from leaderless.rollout.external.vllm_process.worker import PROBE, VllmWorker, _Open, check_version

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


@pytest.mark.parametrize(
    ("keep_weights", "adapters", "level"),
    [(True, {}, 1), (False, {}, 2), (False, {"policy": {"r": 1}}, 1)],
    ids=["needed again", "not needed", "adapters belong to them"],
)
def test_weights_that_are_not_needed_again_are_not_copied_to_host_memory(
    keep_weights: bool, adapters: dict[str, object], level: int
) -> None:
    worker, engine = VllmWorker.__new__(VllmWorker), Mock()
    worker._llm, worker._is_on_accelerator, worker._open = engine, True, {"3": Mock()}
    worker._expected, worker._ready, worker.settings = {}, [Mock()], Mock(adapters=adapters)
    worker.sleep(keep_weights=keep_weights)
    assert not worker._ready
    engine.abort_request.assert_called_once_with(["3"])
    engine.sleep.assert_called_once_with(level=level)


def test_a_bucket_from_another_process_that_was_damaged_is_refused() -> None:
    worker = VllmWorker(Mock(adapters={}, matrices={}, sees_images=False))
    worker._llm = Mock()
    worker._llm.collective_rpc.return_value = [[]]
    data = [torch.full((2,), float(place)).view(torch.uint8) for place in range(3)]
    expected = [checksum(one) for one in data]
    weights = [[PackedWeight(name, "float32", (2,), 0)] for name in ("bias", "kernel", "head")]

    def load() -> None:
        for some, one in zip(weights, data, strict=True):
            worker.load_bucket(some, one, is_checked=True)

    load()
    worker.finish_load(3, expected=expected)
    assert worker._versions == {"": 3}
    data[1][3] ^= 1
    load()
    with pytest.raises(RuntimeError, match="the bucket of 'kernel' to 'kernel' arrived damaged: checksum"):
        worker.finish_load(4, expected=expected)
    assert worker._versions == {"": 3}, "nothing is sampled as if it were of the next version"
    load()
    with pytest.raises(RuntimeError, match="3 buckets of weights have come, but 2 were sent"):
        worker.finish_load(4, expected=expected[:2])


def test_no_checksum_is_computed_of_weights_that_stay_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = InProcessVllm.__new__(InProcessVllm)
    worker.settings, worker._device = Mock(torch_dtype=torch.float32), torch.device("cpu")
    worker._llm, worker._open, worker._versions = Mock(), {}, {}
    worker.settings.sees_images, worker._loading = True, Loading()
    worker._llm.collective_rpc.side_effect = [[None], [[]]]
    worker._loaded = []
    for module in (vllm_engine, vllm_worker):
        monkeypatch.setattr(module, "checksums", Mock(side_effect=AssertionError("nothing to check")))
    worker.load(WeightStream(iter([("bias", torch.ones(2))]), 3))
    loaded, _ = worker._llm.collective_rpc.call_args_list[0].kwargs["args"]
    ((name, tensor),) = loaded
    assert (name, tensor.tolist()) == ("bias", [1.0, 1.0])
    assert worker._versions == {"": 3}
    worker._llm.reset_prefix_cache.assert_called_once_with()
    worker._llm.reset_encoder_cache.assert_called_once_with()  # nothing is left that earlier weights have seen


def test_vllm_is_started_for_ranks_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.config", ModuleType("vllm.config"))
    known = ModuleType("vllm.config.lora")
    monkeypatch.setattr(known, "MaxLoRARanks", Literal[1, 8, 16, 512], raising=False)
    monkeypatch.setitem(sys.modules, "vllm.config.lora", known)
    found = [
        vllm_worker._weights_of(Mock(adapters={"policy": {"r": rank}}))["max_lora_rank"] for rank in (1, 2, 8, 9, 512)
    ]
    assert found == [1, 8, 8, 16, 512]
    with pytest.raises(RuntimeError, match=r"rank 512 at most, and these have 513: .* rollout.external.merge_adapters"):
        vllm_worker._weights_of(Mock(adapters={"policy": {"r": 513}}))
    several = vllm_worker._weights_of(Mock(adapters={"planner": {"r": 3}, "solver": {"r": 9}}))
    assert several == {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 16}
    assert vllm_worker._weights_of(Mock(adapters={})) == {"load_format": "dummy"}


def test_images_go_to_vllm_as_files_with_a_token_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("vllm", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, path, Mock())
    monkeypatch.setattr(sys.modules["vllm"], "TokensPrompt", dict, raising=False)
    driver = VllmWorker(Mock(adapters={}, matrices={}, expert_layers=(), num_drafts=0))
    driver._llm, driver._versions = Mock(), {"": 0}
    external = ExternalEngine("vLLM", driver, Mock(), frozenset({0}), 1e-3, torch.device("cpu"), None, {7, 5})  # type: ignore[arg-type]
    tokens, images = prompt_with([(32, 32), (40, 16)])
    external.submit(Request(tokens, [3], images=images), SamplingParams(SamplingConfig(), 4))
    name, prompt, _ = driver._llm.add_request.call_args.args
    token = reader_of().token
    assert prompt["prompt_token_ids"] == [one for one, _ in groupby(tokens)]
    assert prompt["prompt_token_ids"].count(token) == 2
    assert [image.size for image in prompt["multi_modal_data"]["image"]] == [(32, 32), (40, 16)]
    options = sys.modules["vllm"].SamplingParams.call_args.kwargs
    assert options["logit_bias"] == {5: -100.0, 7: -100.0}
    part = Mock(token_ids=[1], logprobs=[{1: Mock(logprob=-0.5)}], finish_reason="length")
    driver._llm.has_unfinished_requests.return_value = True
    driver._llm.step.return_value = [Mock(request_id=name, prompt_token_ids=tokens[1:], outputs=[part])]
    with pytest.raises(
        RuntimeError, match=f"as {len(tokens) - 1} tokens, and training as {len(tokens)}: its image proc"
    ):
        driver.step()


def test_a_photograph_that_is_turned_is_sent_as_it_is_seen() -> None:
    turned = Image.new("RGB", (8, 4), "red")
    exif = turned.getexif()
    exif[ORIENTATION] = 6
    file = io.BytesIO()
    turned.save(file, "JPEG", exif=exif)
    assert Image.open(io.BytesIO(plain_file(file.getvalue()))).size == (4, 8)
    assert plain_file(picture(8, 4)) == picture(8, 4)


def output(name: str, token: int, experts: Sequence[int] | None = None) -> Mock:
    """What vLLM says about a request: one token, and at its end the experts of two layers for each token."""
    rows = None if experts is None else np.array([[[7, 7], [one, one]] for one in experts])
    part = Mock(token_ids=[token], logprobs=[{token: Mock(logprob=-1.0)}], finish_reason=None, routed_experts=rows)
    known = [None, {2: Mock(logprob=-2.0)}] if name == PROBE else None
    return Mock(
        request_id=name, outputs=[part], finished=experts is not None, num_cached_tokens=3, prompt_logprobs=known
    )


def test_tokens_that_could_be_drawn_have_finite_log_probs_and_all_of_them_are_reported() -> None:
    worker = VllmWorker(Mock(adapters={}, matrices={}))
    worker._llm = Mock()
    worker._llm.vllm_config.model_config.get_vocab_size.return_value = 5
    # Two tokens: the one that was drawn comes first, and then the likeliest.
    scores = SimpleNamespace(
        start_indices=[0, 4],
        end_indices=[4, 8],
        token_ids=[2, 4, 2, 0, 1, 3, 1, 2],
        logprobs=[-1.0, -0.5, -1.0, -math.inf, -2.0, -1.0, -2.0, -2.0],
    )
    assert np.frombuffer(base64.b64decode(worker._support(scores, 0)), np.int32).tolist() == [2, 4]
    with pytest.raises(RuntimeError, match=r"could have drawn more than 3 tokens.*lower rollout\.top_k"):
        worker._support(scores, 1)
    worker._llm.vllm_config.model_config.get_vocab_size.return_value = 3
    assert np.frombuffer(base64.b64decode(worker._support(scores, 1)), np.int32).tolist() == [1, 2, 3]


def test_drafts_are_counted_at_the_end_of_a_response_and_take_the_place_of_steps() -> None:
    worker = VllmWorker(Mock(adapters={}, matrices={}, expert_layers=(), num_drafts=3))
    worker._llm, worker._versions = Mock(), {"": 4}
    worker._open = {"1": _Open("1-a", "", tokens_at_once=16)}
    parts = [
        Mock(token_ids=tokens, logprobs=[{one: Mock(logprob=-1.0)} for one in tokens], finish_reason=None)
        for tokens in ([3, 4], [5], [6, 7, 8, 9], [2], [3])
    ]
    parts[-1].spec_decode_metrics = Mock(num_draft_tokens=9, histogram=[2, 1, 0, 1])
    worker._llm.step.side_effect = [
        [Mock(request_id="1", outputs=[part], finished=part is parts[-1], num_cached_tokens=0)] for part in parts
    ]
    (first,), (last,) = worker.step(), worker.step()
    assert (first.tokens, first.drafts) == ([3, 4, 5, 6, 7, 8, 9, 2], []), "at most 4 steps of 4 tokens"
    assert (last.tokens, last.drafts) == ([3], [9, 4])


def test_each_response_has_the_version_and_the_experts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", Mock())
    worker = VllmWorker(Mock(adapters={}, matrices={}, expert_layers=(1,), num_drafts=0, num_stages=1))
    worker._llm, worker._versions = Mock(), {"planner": 4, "solver": 9}
    worker._open = {"1": _Open("1-a", "planner"), "2": _Open("2-b", "solver")}
    state = Mock(routed_experts_chunks=[output("1", 5, [0, 1]).outputs[0].routed_experts])
    worker._llm.output_processor.request_states = {"1-a": state}
    worker._llm.step.side_effect = [[output("1", 5), output("2", 6, [3])], [output("1", 7)], [output(PROBE, 8, [])]]
    gains = worker.step()
    assert [(gain.id, gain.tokens, gain.policy_version) for gain in gains] == [(1, [5], 4), (2, [6], 9)]
    assert [[base64.b64decode(one) for one in gain.experts] for gain in gains] == [[b"\0\0", b"\1\1"], [b"\3\3"]]
    assert [*worker._open] == ["1"], "the other has ended"
    assert worker.prompt_log_probs([1, 2]) == [-2.0]
    (gain,) = worker.step()  # what the probe's steps have brought
    assert (gain.id, gain.tokens, gain.experts) == (1, [7], []), "no experts twice"
    assert worker._llm.step.call_count == 3


def test_an_engine_that_has_lost_what_it_was_asked_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", Mock())
    worker = VllmWorker(Mock(adapters={}, matrices={}, num_stages=1))
    worker._llm = Mock()
    worker._llm.has_unfinished_requests.return_value = False
    for wait in (worker.step, lambda: worker.prompt_log_probs([1, 2])):
        with pytest.raises(RuntimeError, match="vLLM has nothing in progress, though an answer is awaited"):
            wait()


def test_stages_of_an_engine_are_asked_for_each_token_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace, TokensPrompt=dict))
    worker, asked = VllmWorker(Mock(adapters={}, matrices={}, num_stages=2)), list[tuple[list[int], object]]()
    worker._llm = Mock()
    worker._llm.add_request.side_effect = lambda _, prompt, params, **__: asked.append(
        (prompt["prompt_token_ids"], params)
    )

    def answer() -> list[SimpleNamespace]:
        prompt, params = asked[-1]
        (token,) = params.logprob_token_ids  # type: ignore[attr-defined]
        scores = {99: SimpleNamespace(logprob=0.0), token: SimpleNamespace(logprob=-float(len(prompt)))}
        return [SimpleNamespace(request_id=PROBE, finished=True, outputs=[SimpleNamespace(logprobs=[scores])])]

    worker._llm.step.side_effect = answer
    assert worker.prompt_log_probs([4, 5, 6]) == [-1.0, -2.0]
    assert [prompt for prompt, _ in asked] == [[4], [4, 5]]
    assert {params.temperature for _, params in asked} == {1.0}  # type: ignore[attr-defined]


def test_parts_of_an_engine_meet_where_they_are_told_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Launcher:
        def _distributed_args(self) -> tuple[str, int, int]:
            return "env://", 0, 0

    name = "vllm.v1.executor.uniproc_executor"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(ExecutorWithExternalLauncher=Launcher))
    monkeypatch.setattr(stages, "SHARED_MEMORY", tmp_path)
    for meeting, identity in ((f"file://{tmp_path}/meet", "meet"), ("tcp://a:29500?machine=1", "29500?machine=1")):
        settings = Mock(meeting=meeting, rank=3, device_index=1)
        with stages.met_as_told(settings):
            assert Launcher()._distributed_args() == (meeting, 3, 1)
        assert Launcher()._distributed_args() == ("env://", 0, 0)
        for left in ("meet", f"{identity}-tp:0-[0-1]-cpushm_0", "other-tp:0-[0-1]-cpushm_0"):
            (tmp_path / left).touch()
        stages.forget_meeting(settings)
        assert {left.name for left in tmp_path.iterdir()} == {
            "other-tp:0-[0-1]-cpushm_0",
            *["meet"] * (identity != "meet"),
        }
    stages.forget_meeting(Mock(meeting=None))


def test_requests_name_the_newest_adapters_and_an_engine_that_keeps_others_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def request_of(_: str, number: int, path: str) -> Mock:
        return Mock(lora_int_id=number, path=path)

    def add(request: Mock) -> bool:
        loaded.add(request.lora_int_id)
        return Path(request.path).is_dir()

    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm.lora.request"], "LoRARequest", request_of, raising=False)
    name = "q_proj.lora_A"
    adapters = {role: {"r": 1} for role in ("planner", "solver")}
    worker = VllmWorker(Mock(adapters=adapters, matrices={role: [name] for role in adapters}, sees_images=True))
    loaded, engine = set[int](), Mock(add_lora=add)
    engine.remove_lora, engine.list_loras, worker._llm = loaded.discard, lambda: loaded, engine
    weights, data = [PackedWeight(name, "float32", (1, 2), 0)], torch.ones(2).view(torch.uint8)
    with pytest.raises(KeyError, match="planner"):
        worker._adapters.request("planner")  # not the model without adapters
    worker._open = {"1": _Open("1-a", "planner"), "2": _Open("2-b", "solver")}
    known = dict[str, Mock]()
    for version, role in [(4, "planner"), (9, "solver"), (5, "planner")]:
        worker.load_bucket(weights, data, adapter=role)
        worker.finish_load(version, role)
        assert (worker._versions[role], [*worker._open]) == (version, ["2"] if version == 4 else [])
        assert engine.reset_prefix_cache.called == (version != 4), "it is in use by the other"
        known[role] = worker._adapters.request(role)  # type: ignore[assignment]
        assert loaded == {one.lora_int_id for one in known.values()}
        assert not any(Path(one.path).exists() for one in known.values())
    assert len(loaded) == 2
    engine.reset_encoder_cache.assert_not_called()  # adapters change nothing that is seen of images
    assert worker._adapters.request("") is None, "the model without adapters"
    engine.remove_lora = Mock()
    worker.load_bucket(weights, data, adapter="planner")
    with pytest.raises(RuntimeError, match="vLLM has not loaded the adapters of 'planner' of policy version 6"):
        worker.finish_load(6, "planner")


class _Layer(torch.nn.Module):
    """A layer that waits for its weights, as vLLM leaves it: they have no values."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("experts", "sinks", "scale", "late"):
            weight = torch.nn.Parameter(torch.zeros(3, 2, device="meta"), requires_grad=False)
            self.register_parameter(name, weight)
        self.kernel = torch.nn.Linear(2, 2, device="meta")


def test_what_a_model_writes_without_a_loader_is_written_when_its_layer_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "0.32.0")
    layerwise, meta = ModuleType(f"{RELOAD}.layerwise"), ModuleType(f"{RELOAD}.meta")
    layer, done = _Layer(), list[torch.nn.Module]()
    waiting = {
        layer: SimpleNamespace(loaded_weights=[("scale", None)]),
        layer.kernel: SimpleNamespace(loaded_weights=[]),
    }

    def materialize(layer: torch.nn.Module, _: object) -> None:
        for name, weight in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, torch.nn.Parameter(torch.full_like(weight, -1, device="cpu"), requires_grad=False))

    layerwise.get_layerwise_info = waiting.__getitem__  # type: ignore[attr-defined]
    layerwise._layerwise_process = lambda layer, _: done.append(layer)  # type: ignore[attr-defined]
    meta.materialize_layer = materialize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, layerwise.__name__, layerwise)
    monkeypatch.setitem(sys.modules, meta.__name__, meta)
    values, copies = torch.arange(6.0).view(3, 2), UnseenCopies()
    with copies:
        layer.experts.copy_(values)
        layer.sinks.data.narrow(0, 1, 2).copy_(values[:2])
        layer.scale.copy_(values)  # by a loader, as vLLM has noted
        torch.zeros(3, 2, device="meta").copy_(values)  # nobody's
    copies.keep(layer)
    with copies:  # the next bucket
        layer.late.t().copy_(values.view(2, 3))
    copies.keep(layer)
    copies.write()
    assert layer.experts.tolist() == values.tolist()
    assert layer.sinks.tolist() == [[-1, -1], *values[:2].tolist()]
    assert layer.late.tolist() == values.view(2, 3).t().tolist()
    assert (layer.scale == -1).all(), "vLLM writes it itself"
    assert done == [layer]
    copies.write()
    assert done == [layer], "nothing is written twice"
