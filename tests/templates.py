"""Chat templates, and tokenizers of single bytes that have them."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

CALL = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
TOOLS = "{% for t in tools or [] %}<|im_start|>tools\n{{ t | tojson }}<|im_end|>\n{% endfor %}"
CHATML = (
    TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + CALL + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_NEWLINE = CHATML.replace("<|im_end|>\n", "<|im_end|>")
LLAMA = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}"
    + CALL
    + "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DROPS_REASONING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{% else %}{{ m.content }}{% endif %}",
    )
)
"""As of Qwen3: reasoning is kept only after the last message of the user."""

BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ raise_exception('no such role') }}{% endif %}"
    "{% endfor %}"
)
"""As of Llama 2: nothing marks the beginning of an answer."""

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)


def tokenizer_with(
    template: str | None, *, end: str | None = None, merges: list[tuple[str, str]] | None = None
) -> Qwen2Tokenizer:
    """A tokenizer of single bytes, of special tokens, and of pairs of bytes that merge."""
    merges = merges or []
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(symbols)},
        merges=merges,
        unk_token=None,
        eos_token=end or "<|im_end|>",
        pad_token=None,
        chat_template=template,
    )
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    return tokenizer


def blank_tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters that puts a blank before a text, as SentencePiece does."""
    symbols = ["<unk>", "</s>", "\N{LOWER ONE EIGHTH BLOCK}", *map(chr, range(10, 127))]
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
