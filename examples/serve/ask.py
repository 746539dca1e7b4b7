"""Asks a model served by `leaderless serve`, given the address that the server prints and the name of the model."""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def ask(url: str, model: str, prompt: str) -> list[str]:
    """Ask for two answers to one prompt, with everything that training on them needs.

    Args:
        url: Address that the server prints.
        model: Name of the model.
        prompt: Prompt as text; token ids work as well.
    """
    client = OpenAI(base_url=url, api_key=os.environ.get("LEADERLESS_TOKEN", "none"))
    extra = {"return_token_ids": True, "top_k": 20}
    answer = client.completions.create(
        model=model, prompt=prompt, n=2, max_tokens=12, seed=7, stop="\n", logprobs=0, extra_body=extra
    )
    for choice in answer.choices:
        print(repr(choice.text), choice.finish_reason, choice.token_ids, choice.logprobs.token_logprobs)
    return [choice.text for choice in answer.choices]


def ask_streaming(url: str, model: str, prompt: str) -> str:
    """Ask for one answer, and print it while it is sampled.

    Args:
        url: Address that the server prints.
        model: Name of the model.
        prompt: Prompt as text.
    """
    client = OpenAI(base_url=url, api_key=os.environ.get("LEADERLESS_TOKEN", "none"))
    text = ""
    for delta in client.completions.create(model=model, prompt=prompt, max_tokens=12, seed=7, stream=True):
        print(delta.choices[0].text, end="", flush=True)
        text += delta.choices[0].text
    print()
    return text


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2], "12+34=")
    ask_streaming(sys.argv[1], sys.argv[2], "12+34=")
