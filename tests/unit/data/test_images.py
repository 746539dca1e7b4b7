"""Images in rows: where they come from, how prompts have places for them, and what is refused before a run."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from tests.pictures import picture, reader_of, vision_model
from tests.rows import open_path, recipe_of, write_jsonl
from tests.tiny import tiny_model
from tests.unit.recipes import plan_of

from leaderless.base.image_files import ORIENTATION, decode_image, image_size, plain_file
from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.data import DatasetConfig
from leaderless.config.models import ModelConfig
from leaderless.data.dataset import open_dataset
from leaderless.data.prompts.encode import Encoded, RowEncoder
from leaderless.data.prompts.images import image_folder
from leaderless.data.sources.disk_cache import DataCache
from leaderless.data.sources.parquet import ParquetSource
from leaderless.data.sources.row_sources import Row
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.models.vision.image_readers import open_reader

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def encoder_of(folder: Path, *, template: str | None = None, **settings: str | None) -> RowEncoder:
    tokenizer = load_tokenizer(ModelConfig(path=vision_model()), "policy")
    tokenizer.chat_template = template
    config = DatasetConfig.model_validate({"path": str(folder / "rows.jsonl"), "images": "images", **settings})
    return RowEncoder(tokenizer, config, "data.train", reader=reader_of)


def encoded(folder: Path, row: dict[str, Json], **settings: str | None) -> Encoded:
    encoder = encoder_of(folder, **settings)
    return encoder.encode_texts([encoder.texts(row, "rows.jsonl:7", are_decoded=True)])[0]


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def file_of(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def test_paths_and_data_urls_and_what_parquet_files_hold_are_read(tmp_path: Path) -> None:
    data = picture(32, 24)
    (tmp_path / "a.png").write_bytes(data)
    table = pa.table({"prompt": ["red"], "images": [[{"bytes": data, "path": "a.png"}]]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    row = ParquetSource(tmp_path / "rows.parquet").row(0)
    given: list[Json] = [
        "a.png",
        str(tmp_path / "a.png"),
        url_of(data),
        row["images"],
        {"bytes": None, "path": "a.png"},
    ]
    results = [encoded(tmp_path, {"prompt": "red", "images": one}) for one in given]
    assert all(result == results[0] for result in results)
    (image,) = results[0].images
    assert (image.rows, image.columns, image.data) == (3, 4, data)
    assert encoded(tmp_path, {"prompt": "red", "images": None}).images == ()


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "chat"])
def test_marks_say_where_images_stand(tmp_path: Path, template: str | None) -> None:
    files: list[Json] = [url_of(picture(16, 16)), url_of(picture(32, 8))]
    reader = reader_of()
    start, part, end = reader._marks
    red, blue = encoder_of(tmp_path).tokenizer.encode("redblue")
    first, second = [start, part, part, part, part, end], [start, part, part, part, part, end]
    cases: dict[str, list[int]] = {
        "red<image>blue<image>": [red, *first, blue, *second],
        "<image><image>red": [*first, *second, red],
        "red": [*first, *second, red],  # without marks, images come first
    }
    for prompt, expected in cases.items():
        result = encoded(tmp_path, {"prompt": prompt, "images": files}, template=template)
        assert result.prompt == expected, prompt
        for image in result.images:
            assert result.prompt[image.place : image.place + image.num_tokens] == [part] * image.num_tokens
        assert [(image.rows, image.columns) for image in result.images] == [(2, 2), (1, 4)]
    if template:
        parts: list[Json] = [
            {"type": "text", "text": "red"},
            {"type": "image"},
            {"type": "text", "text": "blue<image>"},
        ]
        messages: list[Json] = [{"role": "user", "content": parts}]
        result = encoded(tmp_path, {"prompt": messages, "images": files}, template=template)
        assert result.prompt == cases["red<image>blue<image>"]
        messages = [{"role": "system", "content": "blue"}, {"role": "user", "content": "red"}]
        result = encoded(tmp_path, {"prompt": messages, "images": files}, template=template)
        assert result.prompt == [blue, *first, *second, red], "images come before the text of the user"


def test_paths_of_images_begin_at_the_folder_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    for path in (tmp_path, tmp_path / "rows.jsonl", tmp_path / "*.jsonl", tmp_path / "part-?" / "*.parquet"):
        assert image_folder(str(path)) == tmp_path


def film() -> bytes:
    first, second = (Image.new("L", (8, 8), shade) for shade in (0, 99))
    return file_of(first, "GIF", save_all=True, append_images=[second])


def damaged() -> bytes:
    return picture(64, 64)[:400]


REFUSED: dict[str, tuple[Callable[[], Json], str]] = {
    "no image": (lambda: url_of(b"hello"), r"5 bytes that begin with b'hello' are no image"),
    "no base64": (lambda: "data:image/png;base64,!!", "an image is no base64"),
    "damaged": (lambda: url_of(damaged()), "an image of 64 x 64 pixels is damaged"),
    "missing": (lambda: "b.png", r"b.png cannot be read: No such file or directory"),
    "wide": (lambda: url_of(file_of(Image.new("1", (20_000, 2)), "PNG")), r"20,000 x 2 pixels; at most 10,000 a side"),
    "thin": (lambda: url_of(file_of(Image.new("1", (9_000, 2)), "PNG")), r"9000 x 2 pixels does not suit the model"),
    "video": (
        lambda: url_of(
            file_of(Image.new("L", (8, 8)), "GIF", save_all=True, append_images=[Image.new("L", (8, 8), 9)])
        ),
        "a file of 2 frames is a video",
    ),
    "deep": (lambda: url_of(file_of(Image.new("I;16", (8, 8)), "PNG")), r"more than 8 bits a number \(mode I;16\)"),
    "network": (lambda: "https://example.org/a.png", "is on the network: download images"),
    "number": (lambda: 7, "an image must be a path or a data URL, not 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_image_that_cannot_be_used_is_named(tmp_path: Path, name: str) -> None:
    make, problem = REFUSED[name]
    with pytest.raises(RecipeError, match=f"data.train.images: rows.jsonl:7: .*{problem}"):
        encoded(tmp_path, {"prompt": "red", "images": [make()]})


@pytest.mark.parametrize(
    ("row", "settings", "problem"),
    [
        ({"prompt": "<image><image>red"}, {}, r"images: .* has places for 2 images \(<image>\), but the row has 1"),
        ({"prompt": "red<|image_pad|>"}, {}, r"images: .* has 2 tokens that stand for an image, but there are 1"),
        (
            {"prompt": "red", "images": None, "r": "<|image_pad|>"},
            {"response": "r"},
            "response: .* must not have '<|im",
        ),
        ({"prompt": "red"}, {"images": "pictures"}, "images: rows.jsonl:7 has no column 'pictures'"),
    ],
)
def test_a_row_whose_images_do_not_fit_its_text_is_named(
    tmp_path: Path, row: dict[str, Json], settings: dict[str, str], problem: str
) -> None:
    with pytest.raises(RecipeError, match=f"data.train.{problem}"):
        encoded(tmp_path, {"images": url_of(picture(8, 8)), **row}, **settings)


def test_an_image_in_a_message_and_a_video_are_refused(tmp_path: Path) -> None:
    for part, problem in (
        ({"type": "image", "image": "a.png"}, "images: .* gives an image itself, by 'image': put it into the column"),
        ({"type": "video"}, "prompt: .* holds a message with a video, which is not read: leave such rows out$"),
    ):
        messages: list[Json] = [{"role": "user", "content": [part]}]
        with pytest.raises(RecipeError, match=f"data.train.{problem}"):
            encoded(tmp_path, {"prompt": messages, "images": None}, template=TEMPLATE)


def test_a_row_that_is_too_long_is_left_out_with_its_images(tmp_path: Path) -> None:
    """Whatever the limit, also within an image, no prompt is cut."""
    sizes = [[(16, 16), (32, 24)], [(8, 8)], [(24, 24)]]
    rows: list[Row] = [
        {"prompt": "red" + "<image>" * len(some) + "blue", "images": [url_of(picture(*size)) for size in some]}
        for some in sizes
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    whole = [encoded(tmp_path, row) for row in rows]
    assert [sum(image.num_tokens for image in one.images) for one in whole] == [16, 1, 9]
    lengths = [len(one.prompt) for one in whole]
    for limit in range(1, max(lengths) + 1):
        usable = [number for number, length in enumerate(lengths) if length <= limit]
        kept = recipe_of(path, {"images": "images", "max_prompt_tokens": limit})
        strict = kept.model_copy(update={"data": kept.data.model_copy(update={"overlong": "error"})})
        if usable:
            dataset = open_dataset(open_path(path), encoder_of(tmp_path), kept, DataCache())
            assert [one.encoded for one in dataset.read(dataset.rows.tolist())] == [whole[number] for number in usable]
        else:
            with pytest.raises(RecipeError, match=r"all 3 rows of .* are overlong"):
                open_dataset(open_path(path), encoder_of(tmp_path), kept, DataCache())
        if len(usable) < len(rows):
            with pytest.raises(RecipeError, match=rf"has a prompt of \d+ tokens, more than {limit}"):
                open_dataset(open_path(path), encoder_of(tmp_path), strict, DataCache())


def test_a_text_model_is_refused_where_rows_have_images(tmp_path: Path) -> None:
    config = ModelConfig(path=tiny_model())
    tokenizer, data = load_tokenizer(config, "policy"), DatasetConfig(path="x", images="images", template="plain")
    with pytest.raises(RecipeError, match=r"^models.policy: models of type qwen2 read text alone"):
        RowEncoder(tokenizer, data, "data.train", reader=lambda: open_reader(config, "policy", tokenizer))
    with pytest.raises(RecipeError, match=r"^data.train.images: needs prompts, but these rows are tasks"):
        RowEncoder(tokenizer, data, "data.train", is_task=True, reader=reader_of)
    (tmp_path / "config.json").write_text((Path(vision_model()) / "config.json").read_text())
    with pytest.raises(RecipeError, match=r"^models.policy: the image processor of .* cannot be loaded"):
        open_reader(ModelConfig(path=str(tmp_path)), "policy")


def test_other_settings_of_images_are_other_rows(tmp_path: Path) -> None:
    for file in Path(vision_model()).iterdir():
        shutil.copy(file, tmp_path)
    described = tmp_path / "preprocessor_config.json"
    same = open_reader(ModelConfig(path=str(tmp_path)), "policy").fingerprint
    assert same == reader_of().fingerprint
    settings = json.loads(described.read_text())
    described.write_text(json.dumps(settings | {"size": {**settings["size"], "shortest_edge": 4096}}))
    assert open_reader(ModelConfig(path=str(tmp_path)), "policy").fingerprint != same


@pytest.mark.parametrize("turned", range(10))
def test_a_photograph_has_the_tokens_of_its_size_as_it_is_seen(tmp_path: Path, turned: int) -> None:
    photograph = Image.new("RGB", (48, 16))
    exif = photograph.getexif()
    exif[ORIENTATION] = turned
    row: dict[str, Json] = {"prompt": "red", "images": url_of(file_of(photograph, "JPEG", exif=exif))}
    (image,) = encoded(tmp_path, row).images
    assert (image.rows, image.columns) == ((6, 2) if 4 < turned < 9 else (2, 6))
    assert image_size(image.data) == decode_image(image.data).size[::-1]
    assert len(reader_of().pixels([image]).places) == 12


def test_a_photograph_of_a_phone_may_have_others_behind_it() -> None:
    red, blue = (Image.new("RGB", (8, 4), color) for color in ("red", "blue"))
    data = file_of(red, "MPO", save_all=True, append_images=[blue])
    pixel = decode_image(data).getpixel((0, 0))
    assert isinstance(pixel, tuple)
    assert pixel[0] > 200
    assert plain_file(data) == data


def test_what_is_transparent_is_white_and_a_photograph_is_turned() -> None:
    clear = decode_image(file_of(Image.new("RGBA", (4, 2), (255, 0, 0, 0)), "PNG"))
    assert clear.getpixel((0, 0)) == (255, 255, 255)
    turned = Image.new("RGB", (8, 4))
    exif = turned.getexif()
    exif[0x0112] = 6  # turned by a quarter
    assert decode_image(file_of(turned, "JPEG", exif=exif)).size == (4, 8)


def test_an_engine_that_takes_no_images_is_refused_by_the_plan(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "red", "images": null}\n')
    train = {"path": str(tmp_path / "rows.jsonl"), "images": "images"}
    external = {"python": "python"}
    for engine, problem in (("sglang", "takes no images, which prompts have"), ("vllm", "")):
        changes = {"data": {"train": train}, "rollout": {"engine": engine, "external": external}}
        if not problem:
            assert "images" in str(plan_of("grpo", **changes).edges)
            continue
        with pytest.raises(RecipeError, match=f"^rollout.engine: '{engine}' {problem}"):
            plan_of("grpo", **changes)
