"""Value models: decoders with a scalar head, which foresee rewards or score whole responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForTokenClassification, PreTrainedModel
from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.models.attention.blocks import Repeats
from leaderless.models.attention.packed import Attention
from leaderless.models.decoder import SCALAR_HEAD, Decoder, check_freezing, load_decoder
from leaderless.models.loading.support import register_classifiers, sees_images

if TYPE_CHECKING:
    from leaderless.models.vision.image_readers import Pixels
    from leaderless.models.vision.mrope import ImagePositions


class ValueModel(Decoder):
    """A token classifier of `transformers` with one output: it predicts the reward that is still to come.

    A reward model, whose number rates a whole response, has no offset: its bias stays 0.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._is_reward_model = False
        self.ignores_images = True  # a critic of text foresees what it can from the text

    def become_reward_model(self, key: str) -> None:
        """Be trained and described as a model that scores whole sequences; `key` is the model's, for errors.

        Raises:
            RecipeError: `transformers` has no sequence classifier of the family.
        """
        self._is_reward_model, self.ignores_images, config = True, False, self.model.config
        if sees_images(config):
            register_classifiers(config)
        found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
        if found is None:
            raise RecipeError.at(
                key,
                f"`transformers` has no sequence classifier of type {config.model_type}, as which a reward model is "
                "exported: choose a model of another family",
            )
        config.architectures = [found.__name__]

    def clear_offset(self) -> None:
        """Set the bias of the head to 0, which sequence classifiers lack."""
        for name, weight in self.trained_weights():
            if name == SCALAR_HEAD[1]:
                nn.init.zeros_(weight)

    @override
    def is_frozen(self, name: str) -> bool:
        return self._is_reward_model and name == SCALAR_HEAD[1]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        select: Tensor | Repeats,
        images: Pixels | ImagePositions | None = None,
    ) -> Tensor:
        """Compute values [R] float32 of the states that end with selected tokens; see `Decoder.hidden_states`.

        A model that sees images gets them, or what it has seen of them.
        """
        hidden = self.hidden_states(tokens, positions, attention, select, *(() if images is None else (images,)))
        if not self.has_head:
            return hidden
        values: Tensor = self._head(hidden.float())
        return values.squeeze(1).clone()  # a back end may hook onto what is returned, and a view could lose the hook

    @property
    def _head(self) -> nn.Module:
        return cast("nn.Module", self.model.score)

    @override
    def float32_modules(self) -> list[nn.Module]:
        """The head: in bfloat16, 1 and 1.003 are the same value."""
        return [self._head] if self.has_head else []


def load_value_model(config: ModelConfig, role: str) -> ValueModel:
    """Load a value model; see `load_decoder`.

    A language model gets a head of zeros, so that every value is 0 at first; a token or sequence classifier with one
    output, such as an exported critic or a reward model, keeps its head.

    Raises:
        RecipeError: As for a language model; or its head has several outputs, or `transformers` has no classifier of
            its family.
    """
    return value_model(load_decoder(AutoModelForTokenClassification, config, role, has_scalar_head=True), config, role)


def value_model(model: PreTrainedModel, config: ModelConfig, role: str) -> ValueModel:
    """The value model of a token classifier, which is described as one from now on; it sees images if that does."""
    model.config.architectures = [type(model).__name__]
    if sees_images(model.config):
        from leaderless.models.vision.image_readers import open_reader
        from leaderless.models.vision.vision_models import VisionValueModel

        return VisionValueModel(model, open_reader(config, role), freezes_vision=config.freeze_vision)
    check_freezing(model, config, role)
    return ValueModel(model)
