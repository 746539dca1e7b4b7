"""Asks a model that `leaderless serve` answers for; takes the address that it prints, and the name of the model."""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def ask(url: str, model: str, prompt: str) -> list[str]:
    """Two answers to one prompt, with what training on them would need.

    Args:
        url: Address of the server, as it prints it.
        model: Its name.
        prompt: Token ids work as well.
    """
    client = OpenAI(base_url=url, api_key=os.environ.get("LEADERLESS_TOKEN", "none"))
    extra = {"return_token_ids": True, "top_k": 20}
    answer = client.completions.create(
        model=model, prompt=prompt, n=2, max_tokens=12, seed=7, stop="\n", logprobs=0, extra_body=extra
    )
    for choice in answer.choices:
        print(repr(choice.text), choice.finish_reason, choice.token_ids, choice.logprobs.token_logprobs)
    return [choice.text for choice in answer.choices]


def ask_piece_by_piece(url: str, model: str, prompt: str) -> str:
    """One answer, printed while it is sampled.

    Args:
        url: Address of the server, as it prints it.
        model: Its name.
        prompt: Text.
    """
    client = OpenAI(base_url=url, api_key=os.environ.get("LEADERLESS_TOKEN", "none"))
    text = ""
    for piece in client.completions.create(model=model, prompt=prompt, max_tokens=12, seed=7, stream=True):
        print(piece.choices[0].text, end="", flush=True)
        text += piece.choices[0].text
    print()
    return text


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2], "12+34=")
    ask_piece_by_piece(sys.argv[1], sys.argv[2], "12+34=")
