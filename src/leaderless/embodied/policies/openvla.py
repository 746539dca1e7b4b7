"""OpenVLA and OpenVLA-OFT as policies: the last ids of the vocabulary are bins of actions.

OpenVLA writes the numbers of one action one after the other. OpenVLA-OFT decides on a chunk of actions at once: empty
places follow the instruction, all places attend to one another, and each place says what comes next. Its published
heads for regression have no likelihood, so the logits of bins are kept, as others do who train it by reinforcement.

Sources: OpenVLA, arXiv 2406.09246; OpenVLA-OFT, arXiv 2502.19645; SimpleVLA-RL, arXiv 2509.09674.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache
from typing_extensions import override

from leaderless.embodied.policies.actions import ActionLimits, BinPolicy, Bins
from leaderless.embodied.policies.pretrained import Pretrained, needs_weights, with_cache
from leaderless.embodied.policies.prismatic import Prismatic, PrismaticPrefix, VlaConfig, load_prismatic
from leaderless.embodied.policies.protocol import Acted, BodyValue, DecisionScores, Observed
from leaderless.embodied.policies.vision_towers import sized
from leaderless.embodied.simulators.protocol import Spaces

NUM_BINS = 256
PROMPT = "In: What action should the robot take to {}?\nOut:"
EMPTY_WORD = "▁"
"""Word that ends every prompt, as in training."""


class TokenBins(Bins):
    """The bins of OpenVLA: 256 borders from -1 to 1, the middles between them, and a last bin like the one before."""

    def __init__(self, limits: ActionLimits) -> None:
        self.limits, self.num, self.dim = limits, NUM_BINS, len(limits.low)

    @override
    def actions_of(self, choices: Tensor, chunk: int) -> Tensor:
        borders = torch.linspace(-1, 1, NUM_BINS, device=choices.device)
        middles = (borders[1:] + borders[:-1]) / 2
        values = middles[choices.long().clamp(max=NUM_BINS - 2)].view(-1, chunk, self.dim)
        return self.limits.restore(values)

    @override
    def choices_of(self, actions: Tensor) -> Tensor:
        values = self.limits.normalize(actions).clamp(-1, 1)
        borders = torch.linspace(-1, 1, NUM_BINS, device=values.device)
        # The number of borders up to a value, less one.
        return (torch.bucketize(values.contiguous(), borders, right=True) - 1).flatten(1).float()


class _Vla(Pretrained):
    """Common part of the policies and the critic: a model that was read from a folder."""

    _no_split_modules = ("_Block", "LlamaDecoderLayer")

    def __init__(self, spaces: Spaces, path: str, cameras: list[str] | None, crop_share: float) -> None:
        super().__init__()
        self.spaces, self._crop_share = spaces, crop_share
        self.config = VlaConfig.read(self.open(spaces, path, cameras))
        if not 0 < crop_share <= 1:
            raise ValueError(f"crop_share={crop_share}: must be above 0, at most 1")
        self.vla = Prismatic(self.config)
        if needs_weights(self._folder):
            load_prismatic(self.vla, self.config, self._folder)

    @override
    def instruction_ids(self, text: str) -> list[int]:
        """Token ids of the prompt with which OpenVLA was trained."""
        tokenizer = self._tokenizer
        ids: list[int] = list(tokenizer(PROMPT.format(text.lower())).input_ids)
        first = int(self.config.text.bos_token_id)
        if ids[:1] != [first]:
            ids.insert(0, first)
        empty = tokenizer.get_vocab().get(EMPTY_WORD)
        if empty is not None and ids[-1] != empty:
            ids.append(empty)
        return ids

    def _prefix(self, observed: Observed) -> PrismaticPrefix:
        size, share = self.config.image_size, self._crop_share
        images = [sized(observed.images[camera], size, crop_share=share) for camera in self._cameras]
        ids, lengths = observed.instructions
        # A place without an instruction, which only makes up a batch, has the first word.
        return self.vla.prefix(images, ids, lengths.clamp(min=1))

    def _hidden(self, embeddings: Tensor, places: Tensor, mask: Tensor, cache: DynamicCache | None = None) -> Tensor:
        """Hidden states of places; `mask` [n, from, to] says what attends to what."""
        hidden: Tensor = self.vla.language_model.model(
            inputs_embeds=embeddings,
            attention_mask=mask[:, None],
            position_ids=places,
            use_cache=cache is not None,
            **with_cache(cache),
        ).last_hidden_state
        return hidden

    def _word(self, ids: Tensor) -> Tensor:
        words: Tensor = self.vla.language_model.get_input_embeddings()(ids)
        return words


def _causal(is_real: Tensor, places: Tensor) -> Tensor:
    """Mask of attention, [n, length, length] bool: each to what is real and not behind it, and to itself."""
    itself = torch.eye(is_real.shape[1], dtype=torch.bool, device=is_real.device)
    return (is_real[:, None] & (places[:, None] <= places[:, :, None])) | itself


class OpenVlaOft(_Vla, BinPolicy):
    """A chunk of actions at once."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        path: str,
        statistics: str,
        chunk: int = 8,
        cameras: list[str] | None = None,
        crop_share: float = 0.9,
        gripper: str = "unchanged",
    ) -> None:
        """Read a policy.

        Args:
            spaces: Observations and actions of the environment.
            path: Folder of a checkpoint in the published form.
            statistics: Name of the dataset of this robot in the `norm_stats` of its `config.json`.
            chunk: Steps of a decision, as in training.
            cameras: Cameras that it sees by; all by default.
            crop_share: Share of the area of images, in the middle, that it sees.
            gripper: `inverted` for an environment that closes the gripper at 1 and opens it at -1, as LIBERO does;
                see `ActionLimits.of_dataset`.
        """
        super().__init__(spaces, path, cameras, crop_share)
        if chunk < 1:
            raise ValueError(f"chunk={chunk}: must be at least 1")
        limits = ActionLimits.of_dataset(self.config.statistics, statistics, spaces, gripper)
        self.begin(spaces, chunk, TokenBins(limits))

    @override
    def logits(self, observed: Observed) -> Tensor:
        """Logits of numbers, from the last word, and all empty places but the last.

        An end of text follows the empty places, as in training. All attend to all.
        """
        prefix, num = self._prefix(observed), self.choice_size
        n, length = prefix.is_real.shape
        device = prefix.last.device
        end = self._word(torch.full((n, 1), int(self.config.text.eos_token_id), device=device))
        empty = torch.zeros(n, num, end.shape[2], device=device, dtype=end.dtype)
        later = prefix.lengths[:, None] + torch.arange(num + 1, device=device)
        is_real = torch.cat([prefix.is_real, torch.ones_like(later, dtype=torch.bool)], dim=1)
        hidden = self._hidden(
            torch.cat([prefix.embeddings, empty, end], dim=1),
            torch.cat([prefix.places, later], dim=1),
            is_real[:, None].expand(-1, is_real.shape[1], -1),
        )
        last = hidden[torch.arange(n, device=device), prefix.last][:, None]
        slots = torch.cat([last, hidden[:, length : length + num - 1]], dim=1)
        logits = self.vla.logits(slots, self.config.num_words, NUM_BINS)
        return logits.view(n, self.chunk, self.bins.dim, NUM_BINS)


class OpenVla(OpenVlaOft):
    """One action at a time, number by number."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        path: str,
        statistics: str,
        cameras: list[str] | None = None,
        crop_share: float = 0.9,
        gripper: str = "unchanged",
    ) -> None:
        """Read a policy; see `OpenVlaOft`."""
        super().__init__(
            spaces,
            path=path,
            statistics=statistics,
            chunk=1,
            cameras=cameras,
            crop_share=crop_share,
            gripper=gripper,
        )

    def _words_of(self, choices: Tensor) -> Tensor:
        return self._word(self.config.num_words - 1 - choices.long())

    def _logits_at(self, hidden: Tensor) -> Tensor:
        """Logits of some places, [n, 1, places, bins]."""
        return self.vla.logits(hidden, self.config.num_words, NUM_BINS)[:, None]

    @override
    def act(self, observed: Observed, noise: Tensor | None, temperature: float = 1.0) -> Acted:
        prefix, cache = self._prefix(observed), DynamicCache()
        rows = torch.arange(len(observed), device=prefix.last.device)
        hidden = self._hidden(prefix.embeddings, prefix.places, _causal(prefix.is_real, prefix.places), cache)
        hidden, is_real = hidden[rows, prefix.last], prefix.is_real
        choices: list[Tensor] = []
        log_probs: list[Tensor] = []
        for number in range(self.bins.dim):
            logits = self._logits_at(hidden[:, None])
            chosen, scored = self.bins.draw(
                logits, None if noise is None else noise[:, number : number + 1], temperature
            )
            choices.append(chosen.flatten(1).float())
            log_probs.append(scored)
            if number + 1 == self.bins.dim:
                break
            is_real = torch.cat([is_real, torch.ones_like(is_real[:, :1])], dim=1)
            place = (prefix.lengths + number)[:, None]
            hidden = self._hidden(self._words_of(choices[-1]), place, is_real[:, None], cache)[:, 0]
        chosen = torch.cat(choices, dim=1)
        return Acted(self.actions_of(chosen), chosen, torch.cat(log_probs, dim=2))

    @override
    def score(self, observed: Observed, choices: Tensor, temperature: float = 1.0) -> DecisionScores:
        prefix = self._prefix(observed)
        words = self._words_of(choices[:, :-1])
        later = prefix.lengths[:, None] + torch.arange(words.shape[1], device=choices.device)
        places = torch.cat([prefix.places, later], dim=1)
        is_real = torch.cat([prefix.is_real, torch.ones_like(later, dtype=torch.bool)], dim=1)
        embeddings = torch.cat([prefix.embeddings, words], dim=1)
        hidden = self._hidden(embeddings, places, _causal(is_real, places))
        rows = torch.arange(len(choices), device=choices.device)
        found = torch.cat([hidden[rows, prefix.last][:, None], hidden[:, prefix.is_real.shape[1] :]], dim=1)
        return self.bins.score(self._logits_at(found), choices, temperature)


class OpenVlaValue(_Vla, BodyValue):
    """A critic that begins with the weights of a policy; its first values are 0."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        path: str,
        chunk: int = 8,
        cameras: list[str] | None = None,
        crop_share: float = 0.9,
        per_step: bool = False,
    ) -> None:
        """Read a model, and add a head; see `OpenVlaOft` and `BodyValue`."""
        super().__init__(spaces, path, cameras, crop_share)
        self.chunk, self.per_step = chunk, per_step
        self.head = self.new_head(int(self.config.text.hidden_size))

    @override
    def name_in_policy(self, name: str) -> str | None:
        return name if name.startswith("vla.") else None

    @override
    def values(self, observed: Observed) -> Tensor:
        prefix = self._prefix(observed)
        hidden = self._hidden(prefix.embeddings, prefix.places, _causal(prefix.is_real, prefix.places))
        last = hidden[torch.arange(len(observed), device=hidden.device), prefix.last]
        return self.shaped(self.head(last))
