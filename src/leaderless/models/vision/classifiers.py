"""Token and sequence classifiers of the families that see images, of which `transformers` has none.

They are made like the classifiers of families of text: a layer without a head, and a linear one behind it.
"""

from __future__ import annotations

from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

_KINDS = {
    "ForTokenClassification": (AutoModelForTokenClassification, GenericForTokenClassification),
    "ForSequenceClassification": (AutoModelForSequenceClassification, GenericForSequenceClassification),
}
"""Endings of the names of classifiers, with the classes that find them and those from which they are made."""


def register_classifiers(described: PreTrainedConfig) -> None:
    """Let the classes `AutoModelFor...Classification` of `transformers` make and load models of a family.

    Args:
        described: Description of a model that sees images. Nothing happens if its family has classifiers already.
    """
    if MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(described), None) is not None:
        return
    whole = MODEL_MAPPING[type(described)]
    family = next(one for one in whole.__mro__[1:] if issubclass(one, PreTrainedModel))
    # Files name weights as the language model's files do.
    language_model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(described)].__name__
    names = next(filter(None, map(get_checkpoint_conversion_mapping, (language_model, described.model_type))), None)
    for ending, (auto_class, generic) in _KINDS.items():
        name = whole.__name__.removesuffix("Model") + ending
        made = type(name, (generic, family), {"__doc__": f"Made like `{generic.__name__}`.", "__module__": __name__})
        if names is not None:
            register_checkpoint_conversion_mapping(name, names, overwrite=True)
        auto_class.register(type(described), made, exist_ok=True)  # else it skips families of its own
