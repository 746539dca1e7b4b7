"""The same kind of program as a process of its own, which could be written in any language."""

from __future__ import annotations

import json
import os

from openai import OpenAI


def main() -> None:
    """Ask twice, the second time with the first answer, and print what that was worth."""
    task = json.loads(os.environ["LEADERLESS_TASK"])
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(2):
        reply = client.chat.completions.create(model="policy", messages=messages)  # type: ignore[call-overload]
        answer = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f" {task['question']}"}]
    print(json.dumps({"reward": float(answer.strip() == task["answer"])}))


if __name__ == "__main__":
    main()
