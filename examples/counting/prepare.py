"""Makes a tiny model that sees images, and pictures of colored squares to count.

A picture has 32 x 32 pixels, with squares on a grid of 4 x 4 places. The question names a color, and the answer is how
many squares have it. Nothing in the text tells the answer, so that a model can be right more often than by guessing
only if it looks. A wrong answer next to it makes a pair of which the right one is preferred.
"""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

from leaderless.models.loading.tiny import write_vision_model

COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230)}
SIDE, PLACES = 32, 4
MOST = 5
"""Largest number of squares of the color that is asked for."""
NUM_PICTURES, NUM_HELD_OUT = 20_000, 512


def prepare(folder: Path, seed: int = 0, num_pictures: int = NUM_PICTURES) -> None:
    """Write `model/`, `train.jsonl`, `test.jsonl` and `shuffled.jsonl`, whose pictures are those of other questions.

    Args:
        folder: Folder to write into.
        seed: Seed of the model's weights and of the pictures.
        num_pictures: Number of pictures to train on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [*map(str, range(MOST + 1)), *COLORS, "how many ", " squares? "]
    write_vision_model(
        folder / "model", words, hidden_size=96, num_layers=3, vision_size=64, num_vision_layers=2, largest_side=SIDE
    )
    generator = random.Random(seed)
    rows = [make_row(generator) for _ in range(num_pictures + NUM_HELD_OUT)]
    mistakes = random.Random(f"mistakes {seed}")  # of its own, so that pictures do not depend on wrong answers
    for row in rows:
        row["wrong"] = mistakes.choice([one for one in map(str, range(MOST + 1)) if one != row["answer"]])
    train, test = rows[:num_pictures], rows[num_pictures:]
    pictures = [row["image"] for row in test]
    generator.shuffle(pictures)
    shuffled = [{**row, "image": picture} for row, picture in zip(test, pictures, strict=True)]
    for name, content in (("train", train), ("test", test), ("shuffled", shuffled)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")


def make_row(generator: random.Random) -> dict[str, str]:
    """A question with its picture and its answer: as many squares as asked for, and up to four of other colors.

    Args:
        generator: Random numbers.
    """
    color, count = generator.choice([*COLORS]), generator.randint(0, MOST)
    others = [generator.choice([one for one in COLORS if one != color]) for _ in range(generator.randint(0, 4))]
    places = generator.sample(range(PLACES * PLACES), count + len(others))
    return {
        "question": f"<image>how many {color} squares? ",
        "image": f"data:image/png;base64,{base64.b64encode(draw([color] * count + others, places)).decode()}",
        "answer": str(count),
    }


def draw(colors: list[str], places: list[int]) -> bytes:
    """A PNG file with squares at some places of the grid.

    Args:
        colors: Color of each square.
        places: Place of each square, from 0 on, row by row.
    """
    picture, size = Image.new("RGB", (SIDE, SIDE), "white"), SIDE // PLACES
    pen = ImageDraw.Draw(picture)
    for color, place in zip(colors, places, strict=True):
        top, left = (number * size + 1 for number in divmod(place, PLACES))
        pen.rectangle((left, top, left + size - 3, top + size - 3), fill=COLORS[color])
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    prepare(Path("runs/counting-data"))
