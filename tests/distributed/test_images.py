"""Images are sent like any column of prompts: whole, and once for all samples of a prompt.

Both the files of the column `images`, and pixels as Qwen2.5-VL reads them, in columns of a custom stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
import torch
from tests.counts import counting_traffic, held_bytes
from tests.distributed.ranks import RankPool
from tests.distributed.user_stages import Context, Loop, recipe_of
from tests.pictures import SIZES, picture, vision_model, write_rows
from tests.rows import open_path

from leaderless.base.values import Json
from leaderless.config import Recipe
from leaderless.config.data import TrainingSetConfig
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch, Jagged, make_sample_ids
from leaderless.data.dataset import make_batch, open_dataset
from leaderless.data.prompts.encode import RowEncoder
from leaderless.data.prompts.images import unpack_images
from leaderless.data.sources.disk_cache import DataCache
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.models.vision.image_readers import open_reader
from leaderless.planner.workflow import Workflow, stage

HERE = "tests.distributed.test_images"
PATCH_VALUES = 1176
"""Shape of a patch: three colors, two frames, and 14 by 14 pixels."""
NUM_PROMPTS = 12


def grids_of(prompt: int) -> list[list[int]]:
    """[num_images, 3]: frames, and rows and columns of patches, of each image of a prompt; some prompts have none."""
    return [[1, 2 + 2 * ((prompt + image) % 3), 4] for image in range(prompt % 4)]


def num_patches(prompt: int) -> int:
    return sum(frames * rows * columns for frames, rows, columns in grids_of(prompt))


def images_of(prompts: Sequence[int]) -> dict[str, Jagged]:
    """The images of some prompts; every bit of a patch depends on its prompt."""
    patches = [
        torch.randint(
            -(2**31), 2**31, (num_patches(prompt), PATCH_VALUES), generator=torch.Generator().manual_seed(prompt)
        )
        for prompt in prompts
    ]
    pixels = torch.cat(patches).int().view(torch.float32)  # NaN among them
    grids = torch.tensor([grid for prompt in prompts for grid in grids_of(prompt)], dtype=torch.int64).view(-1, 3)
    return {
        "pixel_values": Jagged(pixels, torch.tensor([len(rows) for rows in patches]), "patches"),
        "image_grid_thw": Jagged(grids, torch.tensor([len(grids_of(prompt)) for prompt in prompts]), "images"),
    }


@stage(reads=["rows"], writes=["pixel_values", "image_grid_thw"])
def process(batch: Batch, context: Context) -> Batch:
    """The output of a processor for the images in a row."""
    return batch.with_columns(images_of(batch.ids.tolist()))


@stage(reads=["pixel_values", "image_grid_thw"], writes=["tokens"], rows="expand")
def describe(batch: Batch, context: Context) -> Batch:
    """Some answers to each prompt."""
    siblings = context.recipe.batch.responses_per_prompt
    index = torch.arange(len(batch)).repeat_interleave(siblings)
    ids = make_sample_ids(batch.ids[index], torch.arange(siblings).repeat(len(batch)))
    tokens = Jagged.from_lists([[1] * (1 + row % 5) for row in ids.tolist()], torch.int64, "tokens")
    return Batch(ids, {"tokens": tokens}, batch, index)


@stage(reads=["pixel_values", "image_grid_thw"], has_effect=True)
def look(batch: Batch, context: Context) -> Batch:
    """Check that the images are those of the prompts of the rows on this rank, each present once."""
    assert batch.prompts is not None
    assert not batch.columns
    prompts = batch.prompts.ids.tolist()
    assert prompts == batch.group_ids.unique().tolist()
    for name, expected in images_of(prompts).items():
        found = batch.prompts.jagged(name)
        assert found.axis == expected.axis
        assert found.values.dtype == expected.values.dtype
        assert found.lengths.equal(expected.lengths)
        assert found.values.view(torch.uint8).equal(expected.values.view(torch.uint8))
    context.collected.extend({"prompt": prompt} for prompt in prompts)
    return batch


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a step.

    Attributes:
        made: Prompts whose images were there.
        looked_at: Prompts whose images were needed.
        sent: Bytes.
        received: Bytes.
    """

    made: list[int]
    looked_at: list[int]
    sent: int
    received: int


def step(layout: dict[str, Json], responses: int) -> Seen:
    """Images are sent from where they are made to where they are needed."""
    workflow = (
        Workflow("images")
        .node("process", run=f"{HERE}:process")
        .node("describe", run=f"{HERE}:describe", after="process")
        .node("look", run=f"{HERE}:look", after="describe")
    )
    loop = Loop(recipe_of(layout, prompts=NUM_PROMPTS, responses=responses), workflow, 4)
    made: list[int] = []

    def noted(batch: Batch, context: Context) -> Batch:
        made.extend(batch.ids.tolist())
        return process(batch, context)

    loop.stages["process"] = noted
    with counting_traffic() as traffic:
        loop.step()
    assert held_bytes(loop.buffer) == 0, "images are freed behind their last reader"
    return Seen(made, [int(str(row["prompt"])) for row in loop.context.collected], *astuple(traffic))


@pytest.mark.parametrize("responses", [pytest.param(1, marks=pytest.mark.thorough), 8])
@pytest.mark.parametrize(
    ("makers", "lookers"),
    [
        ({"ranks": "0-1"}, {"ranks": "2-3"}),
        ({"ranks": "0-1"}, {"ranks": "2-3", "tp": 2}),
        ({"ranks": "0-1", "tp": 2}, {"ranks": "0-3"}),
    ],
)
def test_images_travel_once_per_prompt_and_consumer(
    ranks: RankPool, makers: dict[str, Json], lookers: dict[str, Json], responses: int
) -> None:
    layout: dict[str, Json] = {"process": makers, "describe": makers, "look": lookers}
    seen = ranks.run(4, step, layout, responses)
    assert {prompt for rank in seen for prompt in rank.looked_at} == set(range(NUM_PROMPTS))
    for rank in seen:
        missing = set(rank.looked_at) - set(rank.made)
        # Two lengths, the patches, and the grid of every image: whatever the number of responses.
        assert rank.received == sum(
            2 * 4 + 4 * PATCH_VALUES * num_patches(prompt) + 8 * 3 * len(grids_of(prompt)) for prompt in missing
        )
    assert sum(rank.received for rank in seen) == sum(rank.sent for rank in seen) > 0


@stage(reads=["prompt_tokens"], has_effect=True)
def see(batch: Batch, context: Context) -> Batch:
    """Note what is here of each prompt; who reads its tokens also gets the files of its images."""
    assert batch.prompts is not None
    assert not batch.columns
    assert batch.prompts.columns.keys() == {"prompt_tokens", "images"}
    tokens, images = (batch.prompts.jagged(name).to_lists() for name in ("prompt_tokens", "images"))
    for prompt, *values in zip(batch.prompts.ids.tolist(), tokens, images, strict=True):
        context.collected.append(dict(zip(("prompt", "tokens", "images"), (prompt, *values), strict=True)))
    return batch


def files_of(recipe: Recipe, model: str, made: list[int]) -> Callable[[int, int], Batch]:
    """What reads prompts as training does, and notes which."""
    train, config = recipe.data.train, ModelConfig(path=model)
    assert isinstance(train, TrainingSetConfig)
    tokenizer = load_tokenizer(config, "policy")
    encoder = RowEncoder(tokenizer, train, "data.train", reader=lambda: open_reader(config, "policy", tokenizer))
    dataset = open_dataset(open_path(Path(train.path)), encoder, recipe, DataCache())

    def read(first: int, last: int) -> Batch:
        made.extend(range(first, last))
        return make_batch(made, dataset.read(made), has_responses=False, has_images=recipe.has_images)

    return read


def step_of_files(path: str, model: str, layout: dict[str, Json], responses: int) -> tuple[Seen, list[dict[str, Json]]]:
    """Files of images are sent from where they are read to where they are needed."""
    train: dict[str, Json] = {"path": path, "prompt": "question", "images": "images", "template": "plain"}
    workflow = (
        Workflow("files")
        .node("sample", run="tests.distributed.user_stages:sample")
        .node("see", run=f"{HERE}:see", after="sample")
    )
    loop = Loop(recipe_of(layout, NUM_PROMPTS, responses, train), workflow, 4)
    made: list[int] = []
    loop.read = files_of(loop.recipe, model, made)
    with counting_traffic() as traffic:
        loop.step()
    assert held_bytes(loop.buffer) == 0
    rows = loop.context.collected
    return Seen(made, [int(str(row["prompt"])) for row in rows], *astuple(traffic)), rows


@pytest.mark.parametrize("responses", [pytest.param(1, marks=pytest.mark.thorough), 8])
def test_files_travel_as_they_are_once_per_prompt_from_pool_to_pool(
    ranks: RankPool, tmp_path: Path, responses: int
) -> None:
    """The column `images` of training: bytes on the wire, and pixels only where they are needed."""
    path = str(write_rows(tmp_path / "rows.jsonl", NUM_PROMPTS))
    layout: dict[str, Json] = {"sample": {"ranks": "0-1"}, "see": {"ranks": "2-3"}}
    results = ranks.run(4, step_of_files, path, vision_model(), layout, responses)
    arrived = [int(str(row["prompt"])) for _, rows in results for row in rows]
    if responses == 1:
        assert sorted(arrived) == [*range(NUM_PROMPTS)]
    assert {*arrived} == {*range(NUM_PROMPTS)}
    for seen, rows in results:
        expected = 0
        for row in rows:
            number, tokens, packed = (row[name] for name in ("prompt", "tokens", "images"))
            sizes = SIZES[number % len(SIZES)]
            files = [picture(*size, seed=10 * number + place) for place, size in enumerate(sizes)]
            assert [image.data for image in unpack_images(bytes(packed))] == files
            # Two lengths, the tokens, and the files with twelve bytes each: whatever the number of responses.
            expected += 2 * 4 + 8 * len(tokens) + sum(12 + len(file) for file in files)
        assert seen.received == expected
    assert sum(seen.sent for seen, _ in results) == sum(seen.received for seen, _ in results)
