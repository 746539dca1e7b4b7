"""Pictures in what environments show: in any turn, computed once, and scored as they were sampled."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import cast, get_args

import numpy as np
import pytest
import torch
from PIL import Image
from tests.pictures import Family, picture, reader_of, vision_model
from tests.unit.models.test_vision import alone, engine_of, gain, loss_of, model_of, native_of
from tests.unit.recipes import make_recipe, plan_of, write_model
from tests.unit.worker.test_followed_episodes import Engine

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch
from leaderless.data.prompts.images import PromptImage, num_alike, unpack_images
from leaderless.environments import chat_writer, pictures
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.engine_scheduler import EngineScheduler
from leaderless.environments.episode import Said, Trace
from leaderless.environments.guarded_environment import EnvironmentFailure, messages_of
from leaderless.environments.journal import episode_of, line_of, text_of
from leaderless.environments.pictures import data_of, with_files
from leaderless.environments.programs.conversations import AskRefusedError, ProgramConversations, checked
from leaderless.environments.protocol import Environment, Message, Observation, Task, Turn
from leaderless.environments.try_model import ModelTrier
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.planner.workflow.columns import IMAGES, LATER_IMAGES
from leaderless.rollout.engine import Completion, Request, SamplingParams, generate
from leaderless.rollout.wrapped_engine import SharedEngine
from leaderless.stages.episode_rollout import check_policy, play_tasks
from leaderless.stages.episode_rollout import reader_of as reader_of_role
from leaderless.stages.episode_samples import Play, Played
from leaderless.worker.asynchronous.in_flight import EngineRequests, Events, PendingRequest

FAMILIES = [family for family in get_args(Family) if family != "paligemma"]
"""Those that read in one direction, and thus take several turns."""
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}"
)
SHOWN = [[(32, 32)], [], [(16, 24), (24, 24)], [(8, 32)]]
"""Widths and heights of the pictures that each turn shows."""


def shown(turn: int, seed: int) -> list[dict[str, object]]:
    files = [picture(*size, seed=seed + 10 * turn + number) for number, size in enumerate(SHOWN[turn])]
    parts: list[dict[str, object]] = [{"type": "image", "image": file} for file in files]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "how many red squares? "}]}]


class Album(Environment):
    """Shows pictures turn by turn; the first of each task are the same for all of its episodes."""

    def reset(self, task: Task, rng: Random) -> Observation:
        self.seed, self.turn = int(str(task["seed"])), 0
        self.own = rng.random()
        return shown(0, self.seed)  # type: ignore[return-value]

    def act(self, text: str) -> Turn:
        self.turn += 1
        if self.turn == len(SHOWN):
            return Turn(reward=float(len(text)), done=True)
        return Turn(shown(self.turn, self.seed), 0.5)  # type: ignore[arg-type]


class Damaged(Environment):
    """Shows what is no picture."""

    def reset(self, task: Task, rng: Random) -> Observation:  # noqa: ARG002
        return [{"role": "user", "content": [{"type": "image", "image": task["image"]}]}]


def played(
    environment: type[Environment],
    tasks: Sequence[dict[str, object]],
    siblings: int = 2,
    family: Family = "qwen3_vl",
    longest_prompt: int = 64,
    **settings: object,
) -> Played:
    recipe = make_recipe(
        models={"policy": vision_model(family)},
        environment={"type": f"{__name__}:{environment.__name__}", "max_turns": 6, "images": True} | settings,
        data={"train": {"path": "rows.jsonl", "template": "plain"}, "max_prompt_tokens": longest_prompt},
        rollout={"max_response_tokens": 3},
    )
    engine = native_of(family, 16)
    batch = Batch(torch.arange(len(tasks)) + 5, {"rows": tuple(tasks)})
    play = Play([SamplingConfig(temperature=1.0)] * siblings, 0, 10, 3)
    data = [recipe.data.train] * len(tasks)
    return play_tasks(engine, play, batch, data, recipe, engine.tokenizer, lambda _: None)  # type: ignore[arg-type]


@cache
def episodes(family: Family = "qwen3_vl") -> Played:
    return played(Album, [{"seed": 0}, {"seed": 100}], family=family)


def texts_of(samples: Batch) -> list[tuple[list[int], list[PromptImage], list[int]]]:
    """All tokens of each sample, all images, and the places of what was sampled."""
    assert samples.prompts is not None
    assert samples.prompt_index is not None
    prompts, images = samples.prompts.jagged("prompt_tokens").to_lists(), samples.prompts.jagged(IMAGES).rows()
    later, masks = samples.jagged(LATER_IMAGES).rows(), samples.jagged("response_mask").to_lists()
    found = []
    for row, place in enumerate(samples.prompt_index.tolist()):
        tokens = [*prompts[place], *samples.jagged("tokens").to_lists()[row]]
        seen = [image for packed in (images[place], later[row]) for image in unpack_images(packed.numpy().tobytes())]
        where = [len(prompts[place]) + number for number, is_own in enumerate(masks[row]) if is_own]
        found.append((tokens, seen, where))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("micro_batch_tokens", [60, 4096])
def test_turns_with_pictures_are_scored_as_they_were_sampled(family: Family, micro_batch_tokens: int) -> None:
    samples = episodes(family).samples()
    assert len(samples) == 4
    assert all(value is None for value in samples.objects("environment_failed"))
    reference, found = model_of(family), engine_of(family, micro_batch_tokens).log_probs(samples).rows()
    reference.model.set_attn_implementation("eager")
    for row, (tokens, images, places) in enumerate(texts_of(samples)):
        assert len(images) == sum(map(len, SHOWN))
        with torch.no_grad():
            expected = alone(reference, tokens[:1], images, tokens[1:])[[place - 1 for place in places]]
        torch.testing.assert_close(samples.jagged("rollout_log_probs").rows()[row], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_gradients_of_turns_with_pictures_are_those_of_rows_alone(family: Family) -> None:
    samples, engine = episodes(family).samples(), engine_of(family, 90)
    for micro_batch in engine.micro_batches(samples):
        loss_of(engine.forward(micro_batch), micro_batch).backward()
    reference = model_of(family)
    reference.model.set_attn_implementation("eager")
    reference.requires_grad_(True)
    for tokens, images, places in texts_of(samples):
        log_probs = alone(reference, tokens[:1], images, tokens[1:])[[place - 1 for place in places]]
        (gain(torch.tensor(tokens)[places]) * log_probs).sum().backward()
    expected = dict(reference.model.named_parameters())
    for name, weight in engine.named_weights():
        other = expected[name].grad
        assert other is None or float((weight.grad - other).norm()) < 1e-5 * max(1.0, float(other.norm())), name


def test_what_all_episodes_of_a_task_begin_with_is_its_prompt_with_its_pictures() -> None:
    samples = episodes().samples()
    assert samples.prompts is not None
    for packed, tokens in zip(
        samples.prompts.jagged(IMAGES).rows(), samples.prompts.jagged("prompt_tokens").to_lists(), strict=True
    ):
        (image,) = unpack_images(packed.numpy().tobytes())
        assert image.data in {picture(32, 32, seed) for seed in (0, 100)}
        assert tokens.count(reader_of().token) == image.num_tokens
    for packed in samples.jagged(LATER_IMAGES).rows():
        assert [len(image.data) > 0 for image in unpack_images(packed.numpy().tobytes())] == [True] * 3


def test_an_episode_that_is_too_long_ends_before_the_picture_that_does_not_fit() -> None:
    """Wherever the limit is within a picture, the samples have whole pictures."""
    (whole, pictures, _), *_ = texts_of(episodes().samples())
    for number, image in enumerate(pictures):
        for limit in {image.place + 1, image.place + image.num_tokens - 1}:
            short = played(Album, [{"seed": 0}], siblings=1, longest_prompt=limit - 1, max_episode_tokens=1)
            (episode,), ((tokens, seen, places),) = short.episodes, texts_of(short.samples())
            if not number:
                assert (episode.cause, seen, places) == ("environment", [], []), "nothing can be said"
                continue
            assert episode.is_cut
            assert len(tokens) <= limit < len(whole)
            assert [one.data for one in seen] == [one.data for one in pictures[: [0, 1, 1, 3][number]]]
            assert tokens.count(reader_of().token) == sum(one.num_tokens for one in seen)
            assert places[-1] == len(tokens) - 1, "it ends with what the policy said last"
            assert short.samples().dense("truncated").tolist() == [True]


class Unlike(Album):
    """Shows each episode another picture of the same size."""

    number = 0

    def reset(self, task: Task, rng: Random) -> Observation:
        super().reset(task, rng)
        type(self).number += 1
        return shown(0, 1000 * type(self).number)  # type: ignore[return-value]


def test_a_prompt_ends_before_pictures_that_differ() -> None:
    samples = played(Unlike, [{"seed": 0}]).samples()
    assert samples.prompts is not None
    (packed,), (tokens,) = (samples.prompts.jagged(name).rows() for name in (IMAGES, "prompt_tokens"))
    assert not len(packed)
    assert len(tokens)
    assert reader_of().token not in tokens.tolist()
    reference = model_of("qwen3_vl")
    reference.model.set_attn_implementation("eager")
    for found, (text, images, places) in zip(
        engine_of("qwen3_vl").log_probs(samples).rows(), texts_of(samples), strict=True
    ):
        assert len(images) == 4
        with torch.no_grad():
            expected = alone(reference, text[:1], images, text[1:])[[place - 1 for place in places]]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_tokens_stand_for_the_same_up_to_the_first_picture_that_differs() -> None:
    one, other, last = PromptImage(2, 1, 3, b"a"), PromptImage(9, 1, 3, b"b"), PromptImage(9, 1, 3, b"c")
    assert num_alike([one, other], [one, other], 20) == 20
    assert num_alike([one, other], [one, last], 20) == 9
    assert num_alike([one], [one, last], 20) == 9
    assert num_alike([one], [one, last], 7) == 7
    assert num_alike([], [one], 20) == num_alike([one], [], 20) == 2


def test_a_conversation_keeps_what_it_has_seen() -> None:
    engine = native_of("qwen3_vl")
    (tokens, images, _), *_ = texts_of(episodes().samples())
    params = SamplingParams(SamplingConfig(temperature=1.0), 4)
    cuts = [images[1].place - 1, images[2].place + 3, len(tokens)]
    begun = tokens[: cuts[0]]
    seen: list[bool] = []
    see = engine.model.seen
    engine.model.seen = lambda *args: seen.append(True) or see(*args)  # type: ignore[method-assign,assignment]
    (first,) = answer(engine, begun, images[:1], 1, params, 7)
    assert seen == [True]
    later = [*begun, *first.tokens, *tokens[cuts[0] :]]
    moved = [images[0], *(image.moved(len(first.tokens)) for image in images[1:])]
    (known,) = answer(engine, later, moved, 2, params, 7)
    fresh = native_of("qwen3_vl")
    (expected,) = answer(fresh, later, moved, 2, params, None)
    assert (known.tokens, len(seen)) == (expected.tokens, 2)
    assert known.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
    whole = (*later, *known.tokens)
    assert engine._kept.num_known(7, (*whole, 1), moved) == len(whole) - 1, "all but the last, which was not read"
    other = next(token for token in range(2, 15) if token != known.tokens[0])
    assert engine._kept.num_known(7, (*later, other, 1), moved) == len(later)
    others = [moved[0], moved[1]._replace(data=picture(16, 24, 555)), *moved[2:]]
    assert engine._kept.num_known(7, (*later, 1), others) == moved[1].place
    (known,) = answer(engine, later, others, 3, params, 7)
    (expected,) = answer(fresh, later, others, 3, params, None)
    assert known.tokens == expected.tokens
    assert known.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


def answer(
    engine: object,
    prompt: list[int],
    images: Sequence[PromptImage],
    number: int,
    params: SamplingParams,
    line: int | None,
) -> list[Completion]:
    request = Request(prompt, [number], conversation=line, images=tuple(images))
    (found,) = generate(engine, [request], params)  # type: ignore[arg-type]
    return found


def test_the_journal_has_each_picture_once_and_gives_it_back() -> None:
    episode = episodes().episodes[0]
    text = text_of(line_of(episode))
    line = json.loads(text)
    assert len(line["images"]) == 4
    assert text.count("data:image/png;base64,") == 4
    again = episode_of(line)
    assert [node.messages for node in again.trace.nodes] == [node.messages for node in episode.trace.nodes]
    assert [one.turn.observation for one in again.answers] == [one.turn.observation for one in episode.answers]


FILE = picture(8, 16, 3)
URL = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"


def given(tmp_path: Path) -> list[object]:
    path = tmp_path / "one.png"
    path.write_bytes(FILE)
    opened = Image.open(io.BytesIO(FILE))
    return [FILE, URL, str(path), path, opened, np.asarray(opened), {"url": URL}]


def test_a_picture_may_be_given_in_many_ways(tmp_path: Path) -> None:
    for image in given(tmp_path):
        ((message,)) = with_files([{"role": "user", "content": [{"type": "image", "image": image}]}])  # type: ignore[dict-item,list-item]
        (part,) = message["content"]  # type: ignore[index,call-overload]
        assert Image.open(io.BytesIO(data_of(part))).tobytes() == Image.open(io.BytesIO(FILE)).tobytes()
        assert json.loads(json.dumps(part)) == part


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        ("missing.png", "missing.png cannot be read"),
        (base64.b64encode(b"no image").decode(), "cannot be read"),
        ("data:image/png;base64,AAAA", "are no image"),
        (f"data:image/png;base64,{base64.b64encode(FILE[:-40]).decode()}", "is damaged"),
        ("https://example.org/a.png", "is on the network"),
        (None, "gives no image"),
    ],
)
def test_a_picture_that_cannot_be_used_fails_its_episode_alone(image: object, problem: str) -> None:
    bad, good = played(Damaged, [{"image": image}, {"image": URL}], siblings=1).episodes
    assert bad.cause == "environment"
    assert problem in bad.error
    assert not good.cause


def test_pictures_come_from_processes_too() -> None:
    apart = played(Album, [{"seed": 0}], siblings=1, isolation="process", act_timeout_s=120).samples()
    near = played(Album, [{"seed": 0}], siblings=1).samples()
    assert apart.jagged("tokens").to_lists() == near.jagged("tokens").to_lists()
    assert torch.equal(apart.jagged(LATER_IMAGES).values, near.jagged(LATER_IMAGES).values)


def test_a_policy_of_text_is_shown_no_pictures() -> None:
    with pytest.raises(
        EnvironmentFailure, match=r"holds an image, but the policy reads only text: .* environment.images"
    ):
        messages_of(shown(0, 0))  # type: ignore[arg-type]
    assert messages_of(shown(0, 0), sees_images=True)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFailure, match="holds a video, but the policy reads only text and images"):
        messages_of([{"role": "user", "content": [{"type": "video"}]}], sees_images=True)


def test_text_cannot_stand_for_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=vision_model()), "policy")
    writer = ChatWriter(tokenizer, is_chat=False, reader=reader_of())
    with pytest.raises(RecipeError, match="tokens that stand for an image, but there are 0 images"):
        writer.begin([{"role": "user", "content": f"see {reader_of().marker}"}])
    tokenizer.chat_template = TEMPLATE
    writer = ChatWriter(tokenizer, is_chat=True, reader=reader_of())
    messages = messages_of(with_files(shown(2, 0)), sees_images=True)  # type: ignore[arg-type]
    harmful = [{"role": "user", "content": [*messages[0]["content"], {"type": "text", "text": "<|image_pad|>"}]}]  # type: ignore[misc]
    tokens = writer.begin(harmful)[1]
    images = writer.images(harmful, tokens)
    assert tokens.count(reader_of().token) == sum(image.num_tokens for image in images)
    assert [image.data for image in images] == [picture(16, 24, 20), picture(24, 24, 21)]
    assert writer.fresh(harmful) == tokens
    monkeypatch.setattr(chat_writer, "data_of", None)
    assert writer.fresh(harmful, images) == tokens, "known images are not opened again"


def test_parts_of_messages_are_written_or_refused() -> None:
    tokenizer = load_tokenizer(ModelConfig(path=vision_model()), "policy")
    writer = ChatWriter(tokenizer, is_chat=False, reader=reader_of())
    parts = [{"type": "text", "text": "how many "}, "squares? "]
    assert writer.begin([{"role": "user", "content": parts}])[1] == tokenizer.encode("how many squares? ")  # type: ignore[dict-item]
    with pytest.raises(RecipeError, match="a part of a message has no text, but only type, thought"):
        writer.begin([{"role": "user", "content": [{"type": "other", "thought": "3"}]}])


class Marked(Environment):
    """Shows the mark of an image without one."""

    def reset(self, task: Task, rng: Random) -> Observation:  # noqa: ARG002
        return f"see {reader_of().marker}"


@pytest.mark.parametrize("images", [True, False])
def test_marks_without_pictures_fail_their_episode_alone(*, images: bool) -> None:
    (bad,) = played(Marked, [{"seed": 0}], siblings=1, images=images).episodes
    assert bad.cause == "environment"
    assert "tokens that stand for" in bad.error


def test_the_pictures_of_a_conversation_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known: set[str] = set()
    first = checked(as_openai(URL, "?"), sees_images=True, known=known)
    monkeypatch.setattr(pictures, "decode_image", None)
    assert checked(as_openai(URL, "?"), sees_images=True, known=known) == first
    assert known == {URL}


async def said_to_nobody() -> list[int]:
    asked: list[list[int]] = []

    class Asked:
        async def ask(self, request: Request, *_: object) -> Completion:
            asked.append([*request.prompt])
            return Completion(tokens=[5], log_probs=[-1.0], finish_reason="stop")

    tokenizer = load_tokenizer(ModelConfig(path=vision_model()), "policy")
    writer = ChatWriter(tokenizer, is_chat=False, reader=reader_of())
    trier = ModelTrier(cast("EngineScheduler", Asked()), writer, None, SamplingParams(SamplingConfig(), 3), 50)
    await trier.say("one", [])
    await trier.say("one", [{"role": "user", "content": "red"}])
    return [len(prompt) for prompt in asked]


def test_an_agent_that_was_told_nothing_may_begin() -> None:
    assert asyncio.run(said_to_nobody()) == [1, 3]


def test_pictures_are_asked_again_in_a_run_that_is_followed() -> None:
    first, again = (EngineRequests(cast("SharedEngine", Engine()), Events(), [SamplingConfig()]) for _ in range(2))
    one, other, changed = PromptImage(1, 1, 2, b"a"), PromptImage(5, 1, 2, b"b"), PromptImage(1, 1, 2, b"c")
    prompts = [([5, 9, 9], (one,)), ([5, 9, 9, 10, 7, 9, 9], (one, other)), ([5, 9, 9, 10, 7, 9, 9], (changed, other))]
    for number, (prompt, images) in enumerate(prompts):
        request = Request(prompt, [number], conversation=4, images=images)
        pending = PendingRequest(request, SamplingParams(SamplingConfig(), 3, seed=2), 0, lambda _: None)
        first.ask(pending)
        first.step()
        followed = again.noted(number, first.events.facts[number], 2, lambda _: None)
        assert followed.request == request
        again.ask(followed)
        again.step()
    assert [len(fact["tokens"]) for fact in first.events.facts] == [3, 3, 6]  # type: ignore[arg-type]


def test_programs_show_pictures_in_the_format_of_openai() -> None:
    trace, tokenizer = Trace(), load_tokenizer(ModelConfig(path=vision_model()), "policy")
    tokenizer.chat_template = TEMPLATE
    conversations = ProgramConversations(trace, ChatWriter(tokenizer, is_chat=True, reader=reader_of()))
    asked: list[Message] = [checked(as_openai(URL, "how many "), sees_images=True)]
    context = conversations.of_messages(asked, ())
    (image,) = context.end.seen()
    assert image.data == FILE
    assert context.tokens[image.place] == reader_of().token
    said = checked({"role": "assistant", "content": "3"})
    conversations.answer(context, tokenizer.encode("3"), said, Said([-1.0], [0], 0))
    others = f"data:image/png;base64,{base64.b64encode(picture(16, 24)).decode()}"
    asked += [said, checked(as_openai(others, " and "), sees_images=True)]
    later = conversations.of_messages(asked, ())
    assert later.end.parent is trace.nodes[1]
    assert [one.data for one in later.end.seen()] == [FILE, picture(16, 24)]
    assert all(later.tokens[one.place] == reader_of().token for one in later.end.seen())


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("/etc/hostname", "is no data URL"),
        ("https://example.org/a.png", "is no data URL"),
        ("data:image/png;base64,AAAA", "are no image"),
        ({"path": "/etc/hostname"}, "is no data URL"),
        ({"bytes": FILE.hex()}, "is no data URL"),
    ],
)
def test_programs_send_pictures_themselves(url: Json, problem: str) -> None:
    with pytest.raises(AskRefusedError, match=f"an image cannot be used: .*{problem}"):
        checked(as_openai(url, "?"), sees_images=True)
    with pytest.raises(AskRefusedError, match="content must be a text, or a list of parts of type 'text'"):
        checked(as_openai(url, "?"))


def as_openai(url: Json, text: str) -> Message:
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


@pytest.mark.parametrize(("engine", "problem"), [("vllm", None), ("native", None), ("sglang", "takes no images")])
def test_plans_name_engines_that_take_no_pictures(engine: str, problem: str | None) -> None:
    external = {} if engine == "native" else {"external": {"python": "python"}}
    sections: dict[str, object] = {
        "environment": {"type": f"{__name__}:Album", "images": True},
        "rollout": {"engine": engine, **external},
    }
    if problem:
        with pytest.raises(RecipeError, match=rf"{problem}, which prompts have \(environment.images\)"):
            plan_of("grpo", **sections)
        return
    plan = plan_of("grpo", **sections)
    assert any("prompt_tokens" in node.reads for node in plan.nodes)
    for node in plan.nodes:
        if "prompt_tokens" in node.reads:
            assert {IMAGES, LATER_IMAGES} <= {*node.reads}, node.name


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("paligemma", {"environment": {"type": f"{__name__}:Album"}}, "reads a prompt in both directions and what"),
        ("paligemma", {"environment": {"type": f"{__name__}:Album", "images": True}}, "the turns of an environment"),
        ("text", {"environment": {"type": f"{__name__}:Album", "images": True}}, "type qwen3 read text alone"),
    ],
)
def test_models_that_cannot_play_are_refused_before_they_are_loaded(
    tmp_path: Path, family: str, changes: dict[str, object], problem: str
) -> None:
    path = write_model(tmp_path / "text") if family == "text" else vision_model(cast("Family", family))
    with pytest.raises(RecipeError, match=rf"models.policy: .*{problem}"):
        plan_of("grpo", models={"policy": path}, **changes)
    recipe, tokenizer = (
        make_recipe(models={"policy": path}, **changes),
        load_tokenizer(ModelConfig(path=vision_model()), "policy"),
    )
    with pytest.raises(RecipeError, match=rf"models.policy: .*{problem}"):
        check_policy(recipe, tokenizer, "policy")
    plan_of("grpo", models={"policy": path})
    check_policy(make_recipe(models={"policy": path}), tokenizer, "policy")


def test_models_that_see_may_play_and_judges_need_not() -> None:
    changes: dict[str, object] = {"environment": {"type": f"{__name__}:Album", "images": True}}
    recipe = make_recipe(models={"judge": "/no/such/model", "policy": vision_model()}, **changes)
    short = {"train": {"path": "rows.jsonl"}, "max_prompt_tokens": 64}
    environment = {"type": f"{__name__}:Album", "images": True, "max_episode_tokens": 200}
    plan_of("grpo", models={"policy": vision_model()}, environment=environment, data=short)
    tokenizer = load_tokenizer(ModelConfig(path=vision_model()), "policy")
    check_policy(recipe, tokenizer, "policy")
    assert reader_of_role(recipe, tokenizer) is not None, "the role that plays, and not the first"
