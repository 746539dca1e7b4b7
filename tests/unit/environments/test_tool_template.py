"""The format of calls follows from the chat template, which has to show tools and results."""

from __future__ import annotations

import pytest
from tests.templates import BRACKETS, CHATML, LLAMA, tokenizer_with
from tests.unit.environments.test_toolbox import add

from leaderless.config import RecipeError
from leaderless.environments.tools.calls import ToolCalls
from leaderless.environments.tools.formats import find_reader, read_hermes, read_llama, read_mistral, read_qwen3_coder
from leaderless.environments.tools.function_tool import FunctionTool

SCHEMAS = [FunctionTool.of(add).schema]
CALL = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
NAMED = (
    '{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}{% endfor %}'
)
XML = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
GLM = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n<arg_key>x</arg_key></tool_call>{% endfor %}"


def read_shouts(text):
    return ToolCalls(text.upper())


def find(name, template):
    return find_reader(name, tokenizer_with(template), SCHEMAS)


@pytest.mark.parametrize(
    ("written", "reader"),
    [
        (CALL, read_hermes),
        (NAMED.replace("arguments", "parameters", 1), read_llama),
        (XML, read_qwen3_coder),
        ("{% if m.tool_calls %}[TOOL_CALLS][" + NAMED + "]{% endif %}", read_mistral),
    ],
)
def test_auto_is_the_format_in_which_the_template_writes_calls(written, reader):
    assert CALL in CHATML
    assert find("auto", CHATML.replace(CALL, written)) is reader


def test_a_format_may_be_named():
    assert find("llama", CHATML) is read_llama
    assert find("mistral", None) is read_mistral
    assert find("llama", LLAMA) is read_llama  # the prompt may describe the tools
    assert find("tests.unit.environments.test_tool_template:read_shouts", CHATML) is read_shouts


@pytest.mark.parametrize(
    ("name", "template", "problem"),
    [
        ("auto", None, "no chat template is used, which would tell the format; set environment.tool_format"),
        ("auto", LLAMA, "the chat template does not show the tool 'add'"),
        ("auto", CHATML.replace(CALL, GLM), "writes calls in an unknown format; set environment.tool_format to"),
        ("hermes", BRACKETS, "of the roles user, assistant, tool: TemplateError: no such role"),
        ("hermes", CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"), "leaves out messages"),
        ("herms", CHATML, "unknown format 'herms' (did you mean 'hermes'?)"),
        ("no.such:reader", CHATML, "module 'no.such' cannot be imported"),
    ],
)
def test_a_template_that_cannot_do_it_is_refused(name, template, problem):
    with pytest.raises(RecipeError) as error:
        find(name, template)
    assert error.value.problems[0].key == "environment.tool_format"
    assert problem in str(error.value)
