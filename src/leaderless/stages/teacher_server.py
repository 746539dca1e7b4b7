"""A teacher behind an address: a server with OpenAI's API that gives log-probabilities of prompts, as vLLM's does.

The tokens of a sample, prompt and response, are a prompt of the server. Its answer has, for each of them, the likeliest
words in its place and the token itself, as vLLM's `prompt_logprobs` says.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

import torch
from torch import Tensor

from leaderless.algorithms.settings import TeacherServerConfig
from leaderless.base.values import Json
from leaderless.data.batch import Batch, Jagged

MAX_ERROR_CHARACTERS = 300
"""Characters of a server's error that are shown."""
TRANSIENT = {408, 409, 425, 429}
"""Statuses after which it helps to ask again, besides those of a server in trouble."""


class TeacherServer:
    """Asks a server about samples, several at a time.

    Args:
        config: Settings of the server.

    Raises:
        RuntimeError: The environment does not have the key of the server.
    """

    def __init__(self, config: TeacherServerConfig) -> None:
        self._config, self._url, self._key = config, urlsplit(config.url), ""
        if config.api_key_env is not None:
            self._key = os.environ.get(config.api_key_env, "")
            if not self._key:
                raise RuntimeError(
                    f"algorithm.distillation.server.api_key_env={config.api_key_env}: the environment has no such "
                    "variable: set it where the workers start"
                )

    def likeliest_words(self, batch: Batch, how_many: int, temperature: float) -> Jagged:
        """Likeliest words at each sampled token, [2, how_many + 1] each, as `DistillingEngine` gives them.

        Log-probabilities are divided by the temperature, so that they are right but for a term that renormalizing
        removes.

        Raises:
            RuntimeError: The server has not answered, or not in the format of vLLM.
        """
        names = ("prompt_tokens", "tokens", "response_mask")
        rows = list(zip(*(batch.jagged(name).to_lists() for name in names), strict=True))
        with ThreadPoolExecutor(self._config.max_requests) as pool:
            answers = list(pool.map(lambda row: self._ask([*row[0], *row[1]], how_many), rows))
        found, lengths = [torch.empty(0, 2, how_many + 1)], []
        for (prompt, tokens, mask), answer in zip(rows, answers, strict=True):
            places = [place for place, is_sampled in enumerate(mask) if is_sampled]
            lengths.append(len(places))
            own = (self._words(answer[len(prompt) + place], int(tokens[place]), how_many) for place in places)
            found += [torch.stack([*own])] if places else []
        values = torch.cat(found)
        values[:, 1] /= temperature
        return Jagged(values, torch.tensor(lengths, dtype=torch.int64), "response_tokens")

    def _words(self, entry: Json, token: int, how_many: int) -> Tensor:
        """[2, how_many + 1] words in place of a token, and their log-probabilities; -1 for no word."""
        if not isinstance(entry, Mapping) or str(token) not in entry:
            raise self._error(
                f"its prompt_logprobs lack the token {token} itself: does it have the student's tokenizer?"
            )
        numbers = {int(word): float(one["logprob"]) for word, one in entry.items() if isinstance(one, Mapping)}  # type: ignore[arg-type]
        kept = sorted(numbers, key=lambda word: (-numbers[word], word))[:how_many]
        kept += [] if token in kept else [token]
        words = torch.full((2, how_many + 1), -1.0)
        words[0, : len(kept)] = torch.tensor(kept).float()
        words[1, : len(kept)] = torch.tensor([numbers[word] for word in kept])
        return words

    def _ask(self, tokens: Sequence[int], how_many: int) -> Sequence[Json]:
        """What the server finds likely in the place of each token."""
        asked = {"model": self._config.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
        body = json.dumps(asked | {"prompt_logprobs": how_many}).encode()
        for attempt in range(self._config.retries + 1):
            status, text = self._exchange(body)
            if status == 200:
                break
            if attempt == self._config.retries or not (status == 0 or status in TRANSIENT or status >= 500):
                shown = " ".join(text.split())[:MAX_ERROR_CHARACTERS]
                raise self._error(f"it answered with status {status}: {shown}" if status else shown)
            time.sleep(min(0.5 * 2**attempt, 30.0))
        try:
            choice = json.loads(text)["choices"][0]
            found: Sequence[Json] = choice["prompt_logprobs"]
            is_whole = len(found) == len(tokens)
        except (ValueError, LookupError, TypeError) as error:
            raise self._error(
                "its answer has no prompt_logprobs, which vLLM's server gives: ask such a server for completions"
            ) from error
        if not is_whole:
            raise self._error(f"its prompt_logprobs are of {len(found)} tokens, and {len(tokens)} were asked about")
        return found

    def _exchange(self, body: bytes) -> tuple[int, str]:
        """Status and text of an answer; status 0 with what went wrong if there is none."""
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=self._config.timeout_s)
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            connection.request("POST", f"{self._url.path.rstrip('/')}/completions", body, headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except (OSError, HTTPException) as error:
            return 0, f"no answer within {self._config.timeout_s:g} s, or none at all ({type(error).__name__}: {error})"
        finally:
            connection.close()

    def _error(self, what: str) -> RuntimeError:
        shown = what.replace(self._key, f"<{self._config.api_key_env}>") if self._key else what
        return RuntimeError(f"the teacher at {self._config.url}: {shown}")
