"""What is wrong with files of models and data is found before a worker starts; GGUF files are unpacked once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.tiny import tiny_model
from typer.testing import CliRunner

from leaderless import Run
from leaderless.cli.main import app
from leaderless.config import RecipeError
from leaderless.config.data import DatasetConfig
from leaderless.run import settings
from leaderless.run.input_files import check_rows, problem_of_model

CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def cut(folder: Path, share: float = 0.5) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


def without_tokenizer(folder: Path) -> None:
    for file in [*folder.glob("*token*"), *folder.glob("*vocab*")]:
        file.unlink()


def only_gguf(folder: Path) -> None:
    (folder / "config.json").rename(folder / "m.gguf")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut in the middle": (cut, "model.safetensors ends before its last weight: download or copy it again"),
    "cut in its header": (lambda folder: cut(folder, 0.001), "model.safetensors ends before its last weight"),
    "no tokenizer": (without_tokenizer, "holds no tokenizer, as tokenizer.json: copy its files there"),
    "GGUF files alone": (only_gguf, "m.gguf"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_of_a_model_is_found_from_its_files(tmp_path: Path, name: str) -> None:
    folder, (damage, words) = Path(shutil.copytree(tiny_model(), tmp_path / "model")), DAMAGES[name]
    assert problem_of_model(str(folder), needs_tokenizer=True) == ""
    damage(folder)
    assert words in problem_of_model(str(folder), needs_tokenizer=True)


def test_data_without_a_row_is_refused_whatever_its_form(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n \n")
    parquet.write_table(pa.table({"q": pa.array([], pa.string())}), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet", "."):
        with pytest.raises(RecipeError, match=r"data.train.path: .* has no rows"):
            check_rows(DatasetConfig(path=str(tmp_path / name)), "data.train")
    (tmp_path / "c.jsonl").write_text('\n{"q": 1}\n')
    check_rows(DatasetConfig(path=str(tmp_path)), "data.train")


def run_of(file: Path, folder: Path) -> Run:
    rows = [{"prompt": "1+1=", "answer": "2"}]
    sections = {"data": {"train": rows}, "reward": {"exact_match": 1}, "run": {"directory": str(folder)}}
    return Run("grpo", name="gguf", models={"policy": str(file)}, steps=1, **sections)


@pytest.mark.skipif(find_spec("gguf") is not None, reason="this Python has the package gguf")
def test_packages_for_gguf_are_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(RecipeError, match=r"m.gguf is a GGUF file, which gguf would read: pip install 'leaderless\[gg"):
        run_of(tmp_path / "m.gguf", tmp_path / "runs")


def write_gguf(file: Path) -> dict[str, np.ndarray]:
    """Write a small Llama whose words are bytes; returns its matrices as they come back from eight bits."""
    import gguf
    from tokenizers import pre_tokenizers

    hidden, inner, heads, random = 32, 64, 2, np.random.default_rng(0)
    words = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer = gguf.GGUFWriter(file, "llama")
    for add, value in (
        (writer.add_name, "tiny"),
        (writer.add_block_count, 1),
        (writer.add_context_length, 2048),
        (writer.add_embedding_length, hidden),
        (writer.add_feed_forward_length, inner),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, heads),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 1e4),
        (writer.add_vocab_size, len(words)),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_token_list, words),
        (writer.add_token_types, [3] + [1] * (len(words) - 1)),
        (writer.add_token_merges, ["a b"]),
        (writer.add_bos_token_id, 0),
        (writer.add_eos_token_id, 0),
        (writer.add_unk_token_id, 0),
        (writer.add_pad_token_id, 0),
        (writer.add_chat_template, CHAT),
    ):
        add(value)
    kept = dict[str, np.ndarray]()
    kinds = {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    kinds |= {f"attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
    for name, shape in [("token_embd", (len(words), hidden)), *((f"blk.0.{one}", size) for one, size in kinds.items())]:
        packed = gguf.quantize(random.normal(size=shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        kept[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def test_a_gguf_file_is_a_model_with_its_weights_and_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from safetensors.numpy import load_file
    from transformers import AutoTokenizer

    kept = write_gguf(tmp_path / "m.gguf")
    run = run_of(tmp_path / "m.gguf", tmp_path / "runs")
    folder = Path(run.recipe.models["policy"].path)
    assert folder.parent == tmp_path / "runs/.inputs"
    weights = load_file(folder / "model.safetensors")
    for name, own in {"token_embd": "embed_tokens", "blk.0.ffn_down": "layers.0.mlp.down_proj"}.items():
        assert np.array_equal(weights[f"model.{own}.weight"], kept[name])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHAT
    assert tokenizer.decode(tokenizer.encode("abc é")) == "abc é"
    size = run.plan().sizes["policy"]
    assert size is not None
    assert size.num_layers == json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"] == 1
    monkeypatch.setattr(settings.subprocess, "run", pytest.fail)
    (tmp_path / "m.gguf").rename(tmp_path / "other.gguf")
    (tmp_path / "other.gguf").rename(tmp_path / "m.gguf")
    assert run_of(tmp_path / "m.gguf", tmp_path / "runs").recipe == run.recipe, "unpacked once"


def test_the_chat_template_of_a_gguf_file_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "m.gguf")
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(app, ["template", "m.gguf", "--json"], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    assert "since the end token is missing" in json.loads(outcome.stdout)["verdict"], "as in the file's template"


def test_a_gguf_file_that_is_cut_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[: len(content) // 2])
    with pytest.raises(RecipeError, match=r"m.gguf is a GGUF file that cannot be unpacked: \w+"):
        run_of(tmp_path / "m.gguf", tmp_path / "runs")
    assert not list((tmp_path / "runs/.inputs").glob("m-*[0-9a-f]"))
