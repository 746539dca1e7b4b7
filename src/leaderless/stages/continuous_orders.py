"""What episodes ask of the engine of a rank that generates continuously; it is noted, so that it can be asked again."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from leaderless.config import Json
from leaderless.config.rollout import SamplingConfig
from leaderless.data.images import PromptImage, num_alike, pack_images, unpack_images
from leaderless.rollout.engine import Completion, Delta, Request, SamplingParams
from leaderless.rollout.shared import SharedEngine
from leaderless.stages.continuous import Events


@dataclass
class EngineWork:
    """See `Work`: what the engine has done for episodes since the last share."""

    busy_s: float = 0.0
    known_tokens: int = 0
    cached_tokens: int = 0


@dataclass(eq=False)
class Wish:
    """A response that an episode asks for; one that is given up may ask for the same when it is begun again.

    Attributes:
        request: Request with one response.
        params: Distribution and limits.
        known_tokens: Tokens at the beginning of the prompt that were read or sampled before in the conversation.
        give: Function that gets the response.
        completion: Tokens sampled so far.
    """

    request: Request
    params: SamplingParams
    known_tokens: int
    give: Callable[[Completion], None]
    completion: Completion = field(default_factory=Completion)


class Orders:
    """Responses that are under way in an engine.

    Attributes:
        work: Work of the engine since the last share.
    """

    def __init__(self, engine: SharedEngine, events: Events, distributions: Sequence[SamplingConfig]) -> None:
        """Have nothing under way.

        Args:
            engine: View of an engine that is awake and has weights.
            events: Record of events between the steps of the engine, which it counts.
            distributions: Distributions from which the policy samples.
        """
        self._engine, self._events, self._distributions = engine, events, distributions
        self._wishes: dict[int, Wish] = {}  # by the number of the request
        self._contexts: dict[int, list[int]] = {}  # of each conversation, what it was last
        self._seen: dict[int, Sequence[PromptImage]] = {}  # the images in it
        self.work = EngineWork()

    @property
    def is_busy(self) -> bool:
        """Whether a response is under way."""
        return bool(self._wishes)

    def ask(self, wish: Wish) -> None:
        """Ask for a response. Of its prompt, only what its conversation did not have before is noted."""
        request, params = wish.request, wish.params
        before, seen = self._before(request.conversation)
        kept = num_alike(seen, request.images, _num_same(before, request.prompt))
        facts: dict[str, Json] = {
            "conversation": request.conversation,
            "kept": kept,
            "tokens": [*request.prompt[kept:]],
            "known": wish.known_tokens,
            "distribution": self._distributions.index(params.distribution),
            "max_tokens": params.max_tokens,
            "stop": [*params.stop],
        }
        if news := [image for image in request.images if image.place >= kept]:
            facts["images"] = base64.b64encode(pack_images(news)).decode()
        self._events.note("ask", request.sample_ids[0], facts)
        self._keep(wish)
        self._wishes[self._engine.submit(request, params)] = wish
        self.work.known_tokens += wish.known_tokens

    def wish_of(self, sample_id: int, facts: Mapping[str, Json], seed: int, give: Callable[[Completion], None]) -> Wish:
        """What was asked for in a run that is followed, from what was noted of it."""
        noted = cast("Mapping[str, int]", facts)
        conversation = cast("int | None", facts["conversation"])
        before, seen = self._before(conversation)
        images = [image for image in seen if image.place < noted["kept"]]
        images += unpack_images(base64.b64decode(str(facts.get("images", ""))))
        prompt = [*before[: noted["kept"]], *cast("list[int]", facts["tokens"])]
        distribution, stop = self._distributions[noted["distribution"]], tuple(cast("list[str]", facts["stop"]))
        params = SamplingParams(distribution, noted["max_tokens"], stop, seed)
        request = Request(prompt, [sample_id], conversation=conversation, images=tuple(images))
        return Wish(request, params, noted["known"], give)

    def drop(self, wish: Wish) -> int:
        """Abort a response that nobody wants any more; returns the number of tokens that are lost."""
        number = next((number for number, one in self._wishes.items() if one is wish), None)
        if number is None:
            return 0  # it has ended
        self._events.note("drop", wish.request.sample_ids[0])
        del self._wishes[number]
        self._engine.abort(number)
        return len(wish.completion.tokens)

    def oldest(self, sample_id: int) -> Wish:
        """What was asked for first of a response that is under way."""
        return next(wish for wish in self._wishes.values() if wish.request.sample_ids[0] == sample_id)

    def forget(self, conversation: int) -> None:
        """Let the engine release what it keeps of a conversation."""
        self._events.note("forget", conversation)
        self._contexts.pop(conversation, None)
        self._seen.pop(conversation, None)
        self._engine.forget(conversation)

    def step(self) -> None:
        """Let the engine take a step, and deliver what has ended."""
        self._events.steps += 1
        begin = time.perf_counter()
        deltas = self._engine.step()
        self.work.busy_s += time.perf_counter() - begin
        self._deliver(deltas)

    def collect(self) -> None:
        """Deliver what an evaluation's steps have brought."""
        self._deliver(self._engine.collect())

    def reset(self) -> None:
        """Forget everything."""
        self._wishes.clear()
        self._contexts.clear()
        self._seen.clear()
        self._engine.sleep(keep_weights=True)

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.request not in self._wishes:
                continue  # dropped
            wish = self._wishes[delta.request]
            wish.completion.add(delta)
            self.work.cached_tokens += min(delta.cached_tokens, wish.known_tokens)
            if delta.finish_reason is not None:
                del self._wishes[delta.request]
                self._keep(wish)
                wish.give(wish.completion)

    def _keep(self, wish: Wish) -> None:
        if wish.request.conversation is not None:
            self._contexts[wish.request.conversation] = [*wish.request.prompt, *wish.completion.tokens]
            self._seen[wish.request.conversation] = wish.request.images

    def _before(self, conversation: int | None) -> tuple[list[int], Sequence[PromptImage]]:
        """What a conversation was last, and the images in it."""
        if conversation is None:
            return [], ()
        return self._contexts.get(conversation, []), self._seen.get(conversation, ())


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
