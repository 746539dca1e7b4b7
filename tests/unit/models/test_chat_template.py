"""Chat templates that are append-only, and those that are not."""

from __future__ import annotations

import json

import pytest
from tests.end_to_end.cli import command
from tests.templates import (
    BRACKETS,
    CHATML,
    DROPS_REASONING,
    LLAMA,
    WITHOUT_NEWLINE,
    blank_tokenizer_with,
    tokenizer_with,
)
from tests.unit.recipes import make_recipe

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.models.chat_templates.check import check_template
from leaderless.models.chat_templates.trials import chat, tool_chat
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.worker.build.process import warning_of_drift

RAISES = "{%% if messages[0].role == 'system' %%}{{ raise_exception('no system here') }}{%% endif %%}%s"


@pytest.mark.parametrize("template", [CHATML, LLAMA, WITHOUT_NEWLINE])
def test_pieces_of_an_append_only_template_rebuild_the_rendering(template):
    tokenizer = tokenizer_with(template)
    report = check_template(tokenizer)
    assert report.is_append_only
    assert report.verdict() == "append-only: the turns of an episode are one sample"
    assert not report.refused
    makers = [make for make in (chat, tool_chat) for _ in range(2)]
    for trial, make, has_reasoning in zip(report.trials, makers, [False, True] * 2, strict=True):
        conversation = make(has_system=True, has_reasoning=has_reasoning)
        text = tokenizer.apply_chat_template(
            conversation.messages, tools=conversation.tools or None, add_generation_prompt=True, tokenize=False
        )
        assert conversation.name == trial.conversation
        tokens = [token for piece in trial.pieces for token in piece.tokens]
        assert tokens == tokenizer.encode(text, add_special_tokens=False)
        assert "".join(piece.text for piece in trial.pieces) == text


def test_pieces_keep_the_blanks_of_a_tokenizer_that_puts_one_before_a_text():
    tokenizer = blank_tokenizer_with(BRACKETS)
    report = check_template(tokenizer)
    assert report.is_append_only
    messages = chat(has_system=False, has_reasoning=False).messages
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    pieces = report.trials[0].pieces
    assert [token for piece in pieces for token in piece.tokens] == tokenizer.encode(text, add_special_tokens=False)
    assert [piece.text for piece in pieces if piece.place == "after a user message"] == [" [/INST]"] * 3
    assert "".join(piece.text for piece in pieces) == text


def test_template_that_renders_tool_calls_only_within_a_conversation_is_tried_without_tools():
    raises = "{% if messages[-1].tool_calls %}{{ raise_exception('a call is not the end') }}{% endif %}" + CHATML
    report = check_template(tokenizer_with(raises))
    assert "a call is not the end" in report.refused["tools"]
    assert [trial.conversation for trial in report.trials] == ["answers", "answers with reasoning"]


def test_template_that_refuses_a_system_message_alone_has_all_pieces():
    raises = "{% if messages[-1].role == 'system' %}{{ raise_exception('no question') }}{% endif %}" + CHATML
    report = check_template(tokenizer_with(raises))
    assert report.is_append_only
    assert report.trials[0].pieces[2].text == "<|im_end|>\n<|im_start|>user\n"


def test_boundaries_are_named():
    report = check_template(tokenizer_with(CHATML))
    found = {piece.place: piece.text for piece in report.trials[0].pieces if piece.is_scaffold}
    assert found == {
        "before the system message": "<|im_start|>system\n",
        "after the system message": "<|im_end|>\n",
        "after the end token": "\n",
        "before a user message": "<|im_start|>user\n",
        "after a user message": "<|im_end|>\n",
        "before an answer": "<|im_start|>assistant\n",
    }
    tools = {piece.place: piece.text for piece in report.trials[2].pieces if piece.is_scaffold}
    assert tools["before a tool result"] == "<|im_start|>tool\n"
    assert tools["after a tool result"] == "<|im_end|>\n"
    assert report.end == "<|im_end|>"


def test_nothing_follows_the_end_token_of_a_template_without_the_newline():
    assert "after the end token" not in {p.place for p in check_template(tokenizer_with(WITHOUT_NEWLINE)).boundaries()}


def test_an_end_token_that_is_not_the_tokenizers_is_found():
    assert check_template(tokenizer_with(LLAMA)).end == "<|eot_id|>"


def test_dropped_reasoning_begins_a_sample_at_each_user_message_but_not_at_tool_results():
    report = check_template(tokenizer_with(DROPS_REASONING))
    assert not report.is_append_only
    assert {difference.cause for difference in report.differences} == {"earlier reasoning is dropped"}
    assert {difference.after for difference in report.differences} == {"user"}
    assert "after each user message, since" in report.verdict()
    plain, reasoned, tools, reasoned_tools = report.trials
    assert not plain.differences
    assert not tools.differences
    assert [difference.turn for difference in reasoned.differences] == [2, 3]
    assert [difference.turn for difference in reasoned_tools.differences] == [3]
    first = reasoned.differences[0]
    assert first.was_text.startswith("<think>"[: len(first.was_text)])
    assert first.now_text.startswith("Answer 1"[: len(first.now_text)])


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        (CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1].strip() }}"), "reasoning is dropped"),
        (CHATML.replace("{{ m.content }}", "{{ m.content.replace('\n', ' ') }}"), "white space is changed"),
        (CHATML.replace("m.role }}\n", "m.role }} of {{ messages | length }}\n"), "text is rewritten"),
        (CHATML.replace("<|im_end|>", ""), "the end token is missing"),
    ],
)
def test_cause_of_a_difference_is_named(template, cause):
    report = check_template(tokenizer_with(template))
    assert any(difference.cause.endswith(cause) for difference in report.differences)
    assert cause in report.verdict()


def test_an_empty_block_of_reasoning_that_is_dropped_is_reasoning():
    block = (
        "{% if m.role == 'assistant' and loop.last and '<think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
    )
    report = check_template(tokenizer_with(CHATML.replace("{{ m.content }}", block + "{{ m.content }}")))
    assert [len(trial.differences) for trial in report.trials] == [2, 0, 3, 0]
    assert {difference.cause for difference in report.differences} == {"earlier reasoning is dropped"}


def test_characters_of_two_turns_that_become_one_token_are_found():
    template = CHATML.replace("{{ m.role }}\n", "{{ m.role }}: ").replace("assistant\n", "assistant: ")
    tokenizer = tokenizer_with(template, merges=[("Ġ", "A")])
    causes = {difference.cause for difference in check_template(tokenizer).differences}
    assert causes == {"characters of two turns become one token"}


def test_prompt_that_opens_the_reasoning_has_only_answers_with_reasoning():
    opens = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    report = check_template(tokenizer_with(opens))
    assert report.is_append_only
    assert [trial.conversation for trial in report.trials] == ["answers with reasoning", "tool calls with reasoning"]
    sampled = next(piece for piece in report.trials[0].pieces if piece.place == "assistant")
    assert sampled.text.startswith("Thought 1")


def test_template_that_refuses_a_system_message_is_tried_without_one():
    report = check_template(tokenizer_with(RAISES % CHATML))
    assert report.is_append_only
    assert "no system here" in report.refused["system"]
    assert "before the system message" not in {piece.place for piece in report.boundaries()}


def test_template_that_refuses_tools_or_leaves_them_out_is_tried_without_them():
    raises = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + CHATML
    leaves_out = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    for template, problem in ((raises, "no tools here"), (leaves_out, "the role 'tool'")):
        report = check_template(tokenizer_with(template))
        assert problem in report.refused["tools"]
        assert len(report.trials) == 2


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('nobody may ask') }}", "role 'user'.*nobody may ask"),
        ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}", "role 'assistant'"),
    ],
)
def test_template_that_cannot_be_tried_is_refused(template, problem):
    with pytest.raises(RecipeError, match=problem):
        check_template(tokenizer_with(template))


def test_command_gives_the_verdict_for_people_and_programs(tmp_path):
    for name, template in (("good", CHATML), ("bad", DROPS_REASONING), ("none", None)):
        tokenizer_with(template).save_pretrained(tmp_path / name)
    good = command(str(tmp_path), ["template", "good"])
    assert good.code == 0
    assert good.output.startswith("append-only: the turns of an episode are one sample\n")
    bad = command(str(tmp_path), ["template", "bad", "--json"])
    assert bad.code == 0
    facts = json.loads(bad.output)
    assert not facts["is_append_only"]
    assert facts["trials"][1]["differences"][0]["cause"] == "earlier reasoning is dropped"
    text = command(str(tmp_path), ["template", "bad"]).output
    assert text.startswith(
        "not append-only: episodes continue with what was sampled, and differ from what the template"
    )
    assert "would write after each user message, since" in text
    assert "answers with reasoning, turn 2: earlier reasoning is dropped (token 81)" in text
    none = command(str(tmp_path), ["template", "none"])
    assert none.code == 2
    assert "error none: the tokenizer has no chat template" in none.errors


@pytest.mark.parametrize(("template", "is_warned_of"), [(CHATML, False), (DROPS_REASONING, True), (None, False)])
def test_a_run_with_episodes_says_that_its_template_is_not_append_only(tmp_path, template, is_warned_of):
    tokenizer_with(template).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    tokenizer = load_tokenizer(config, "policy")
    played = make_recipe(environment={"type": "calculator"}, data={"train": {"path": "rows.jsonl"}})
    text = warning_of_drift(played, config, tokenizer)
    assert text.startswith("the chat template is not append-only: ") is is_warned_of
    assert (config.path in text) is is_warned_of
    assert not warning_of_drift(make_recipe(), config, tokenizer), "without episodes there are no later turns"
