"""A pretrained model behind `leaderless serve`, asked by the official clients of OpenAI and Anthropic to call a tool.

    python benchmarks/served_apis.py MODEL            # a folder with an instruction-tuned model that calls tools
    python benchmarks/served_apis.py MODEL --only messages responses

Each API is asked for the same call of a tool, which is demanded, whole and streamed, at temperature 0: the answers must
be equal. Then it is given the result of the tool, and has to use it, without tools. Further features have checks of
their own. Prints one line for each; the exit code is 1 if one has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai

DEADLINE_S = 3600.0
QUESTION = "What is the weather in Paris? Use the tool."
RESULT = "It is 31 degrees in Paris, with thunder."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name of the city."}},
    "required": ["city"],
}
DESCRIBED = {"name": "get_weather", "description": "Says how the weather is in a city."}
FUNCTION: Any = {**DESCRIBED, "parameters": SCHEMA}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}


class Site:
    """The server, and a client for each API."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        options: Any = {"api_key": "none", "max_retries": 0, "timeout": DEADLINE_S}
        self.openai = openai.OpenAI(base_url=url, **options)
        self.anthropic = anthropic.Anthropic(base_url=url.removesuffix("/v1"), **options)
        self.model = self.openai.models.list().data[0].id


def chat(site: Site) -> str:
    """Chat completions of OpenAI."""
    messages: Any = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": site.model, "temperature": 0, "max_tokens": 48, "tools": [CHAT_TOOL]}
    demanded: Any = asked | {"messages": messages, "tool_choice": "required", "parallel_tool_calls": False}
    whole = site.openai.chat.completions.create(**demanded).choices[0]
    pieces = [piece.choices[0] for piece in site.openai.chat.completions.create(stream=True, **demanded)]
    (call,) = whole.message.tool_calls or []
    streamed = [one for piece in pieces for one in piece.delta.tool_calls or []]
    assert [one.function.arguments for one in streamed] == [call.function.arguments]
    assert "".join(piece.delta.content or "" for piece in pieces) == (whole.message.content or "")
    messages += [whole.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    answer = site.openai.chat.completions.create(messages=messages, tool_choice="none", **asked)
    said = answer.choices[0].message.content or ""
    return checked(call.function.name, json.loads(call.function.arguments), said)


def messages(site: Site) -> str:
    """Messages of Anthropic."""
    turns: Any = [{"role": "user", "content": QUESTION}]
    tool = {**DESCRIBED, "input_schema": SCHEMA}
    asked: Any = {"model": site.model, "max_tokens": 48, "tools": [tool], "extra_body": {"temperature": 0}}
    demanded: Any = asked | {"tool_choice": {"type": "tool", "name": "get_weather"}}
    whole = site.anthropic.messages.create(messages=turns, **demanded)
    with site.anthropic.messages.stream(messages=turns, **demanded) as stream:
        streamed = stream.get_final_message()
    (call,) = [block for block in whole.content if block.type == "tool_use"]
    assert [b.input for b in streamed.content if b.type == "tool_use"] == [call.input]
    assert (whole.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")
    assert streamed.usage == whole.usage
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    turns += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = site.anthropic.messages.create(messages=turns, tool_choice={"type": "none"}, **asked).content[0]
    return checked(call.name, call.input, answer.text if answer.type == "text" else "")


def responses(site: Site) -> str:
    """Responses of OpenAI."""
    tools = [{"type": "function", **FUNCTION}]
    asked: Any = {"model": site.model, "temperature": 0, "max_output_tokens": 48, "tools": tools}
    demanded: Any = asked | {"input": QUESTION, "tool_choice": {"type": "function", "name": "get_weather"}}
    whole = site.openai.responses.create(**demanded)
    with site.openai.responses.stream(**demanded) as stream:
        streamed: Any = stream.get_final_response()
    (call,) = [item for item in whole.output if item.type == "function_call"]
    assert [item.arguments for item in streamed.output if item.type == "function_call"] == [call.arguments]
    assert streamed.usage == whole.usage
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    answer = site.openai.responses.create(input=result, previous_response_id=whole.id, tool_choice="none", **asked)
    return checked(call.name, json.loads(call.arguments), answer.output_text)


def checked(name: str, arguments: object, answer: str) -> str:
    """The call and the answer as one line, if the model has called the tool, and has read its result."""
    assert name == "get_weather"
    assert arguments == {"city": "Paris"}, arguments
    assert "31" in answer, answer
    return f"{name}({arguments}) -> {answer!r}"


def schema(site: Site) -> str:
    """An answer by a JSON schema."""
    named = {"name": "place", "schema": SCHEMA | {"additionalProperties": False}}
    form: Any = {"type": "json_schema", "json_schema": named}
    messages: Any = [{"role": "user", "content": "Which city is the capital of France? Answer in JSON."}]
    reply = site.openai.chat.completions.create(
        model=site.model, temperature=0, max_tokens=32, messages=messages, response_format=form
    )
    found = json.loads(reply.choices[0].message.content or "")
    assert found == {"city": "Paris"}, found
    return str(found)


def scores(site: Site) -> str:
    """Log-probabilities of a prompt, against transformers in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    text = "The capital of France is Paris. 2 + 3 = 5."
    extra = {"return_token_ids": True}
    asked: Any = {"model": site.model, "prompt": text, "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = site.openai.completions.create(extra_body=extra, **asked).choices
    tokens: Any = choice.prompt_token_ids  # type: ignore[attr-defined]
    model = AutoModelForCausalLM.from_pretrained(site.folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    own = [float(expected[place, token]) for place, token in enumerate(tokens[1:])]
    found: Any = choice.logprobs
    most = max(abs(one - other) for one, other in zip(own, found.token_logprobs[1:], strict=True))
    assert most < 1e-3, most
    return f"log-probabilities of {len(own)} tokens differ by at most {most:.1e}"


FEATURES: dict[str, Callable[[Site], str]] = {
    "chat": chat,
    "messages": messages,
    "responses": responses,
    "schema": schema,
    "scores": scores,
}


def main() -> None:
    """Serve the model, and try all features."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="*", choices=FEATURES, default=list(FEATURES))
    options = parser.parse_args()
    command = [sys.executable, "-m", "leaderless", "serve", str(options.model), "--port=0", "--max-context=1024"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    has_failed = False
    try:
        line = next(line for line in server.stdout if " answers at " in line)
        site = Site(line.partition(" answers at ")[2].partition(";")[0], options.model)
        for name in options.only:
            begin = time.monotonic()
            try:
                print(f"{name}: {FEATURES[name](site)} ({time.monotonic() - begin:.0f} s)", flush=True)
            except (AssertionError, ValueError, openai.APIError, anthropic.APIError) as error:
                has_failed = True
                print(
                    f"{name} FAILED after {time.monotonic() - begin:.0f} s: {type(error).__name__}: {error}", flush=True
                )
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
