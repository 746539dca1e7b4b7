"""Makes a tiny untrained model, and demonstrations of Nim by players who move at random.

The model learns from them how a move is written and which the rules allow, but not which are good: that is left to
games against itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

from examples.nim.game import Nim, random_move
from transformers import AutoTokenizer

from leaderless.models.loading.tiny import END_TOKEN, write_tiny_model

NUM_GAMES, NUM_TASKS, NUM_HELD_OUT = 4_000, 2_000, 256
LARGEST = (3, 4, 5)
"""Piles with which the game begins by itself, and when it is measured. Other games begin with some of them gone."""
SIZE = re.compile(r"pile \d: (\d)")
PHRASES = ["\nCurrent Pile:\n  pile 0: ", "\n  pile 1: ", "\n  pile 2: ", " from pile ", "[0 ", "[1 ", "[2 "]
PHRASES += [phrase for player in (0, 1) for phrase in (f"[Player {player}] ", f"Player {player} removes ")]
"""What the game says again and again: each is one token, as are the marks of the template and the rules."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<moves>{{ m.content }}" + END_TOKEN + "\n"
    "{% else %}<told>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<moves>{% endif %}"
)


def prepare(folder: Path, seed: int = 0) -> None:
    """Write `model/`, `demonstrations.jsonl`, `train.jsonl` and `test.jsonl`.

    Args:
        folder: Folder to write into.
        seed: Seed of the model's weights and the demonstrations.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = Random(seed)
    games = [played(generator) for _ in range(NUM_GAMES)]
    first = "pile 0: "
    rules = {messages[0]["content"].partition(first)[0] + first for game in games for messages in game if messages}
    words = ["<told>", "<moves>", *sorted(rules), *PHRASES]
    characters = "0123456789]. \n"
    write_tiny_model(folder / "model", characters, chat_template=TEMPLATE, words=words, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    demonstrations = [
        {
            "prompt": tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, tokenize=False),
            "response": messages[place]["content"],
        }
        for game in games
        for messages in game
        for place in range(1, len(messages), 2)
    ]
    train = [{"piles": some_piles(generator)} for _ in range(NUM_TASKS)]
    contents = {"demonstrations": demonstrations, "train": train, "test": [{"piles": LARGEST}] * NUM_HELD_OUT}
    for name, rows in contents.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def some_piles(generator: Random) -> list[int]:
    """Piles with which a game may begin.

    Args:
        generator: Random numbers.
    """
    piles = [generator.randint(0, largest) for largest in LARGEST]
    return piles if any(piles) else some_piles(generator)


def played(generator: Random) -> list[list[dict[str, str]]]:
    """The conversations of both players of a game, who move at random.

    Args:
        generator: Random numbers.
    """
    game = Nim()
    said: dict[str, list[dict[str, str]]] = {agent: [] for agent in game.agents}
    agent, news = game.agents[0], game.reset({"piles": some_piles(generator)}, generator)
    while news:
        piles = [int(size) for size in SIZE.findall(news)[-3:]]
        said[agent] += [
            {"role": "user", "content": news},
            {"role": "assistant", "content": random_move(piles, generator)},
        ]
        turn = game.act(said[agent][-1]["content"])
        agent, news = turn.agent or agent, str(turn.observation)
    return list(said.values())


if __name__ == "__main__":
    prepare(Path("runs/nim-data"))
