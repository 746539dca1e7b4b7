"""Runs that were changed after they were written, or written wrong from the beginning, for `leaderless verify`."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from leaderless.data.row_hashes import RecordedRow
from leaderless.observability.proof_log import FIRST, RowSum, line_hash, text_hash

Line = dict[str, Any]


def lines_of(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: list[Line]) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def checkpoints_of(lines: list[Line]) -> Line:
    return {name: value for line in lines for name, value in line.get("checkpoints", {}).items()}


class Copy(NamedTuple):
    """A run that may be changed, and another one that was made with another seed."""

    run: Path
    other: Path

    def change_lines(self, name: str, change: Callable[[list[Line]], object]) -> None:
        lines = lines_of(self.run / name)
        change(lines)
        write(self.run / name, lines)

    def change_samples(self, change: Callable[[list[Line]], object]) -> None:
        self.change_lines("samples/step-000003.rank-0.jsonl", change)

    def change_proof(self, change: Callable[[list[Line]], object]) -> None:
        self.change_lines("proof.jsonl", change)

    def weights(self) -> Path:
        (file,) = (self.run / "checkpoints/step-000002/policy").glob("*.safetensors")
        return file

    def list_again(self, number: int = 2) -> None:
        """Write the list of files of a checkpoint anew, as for the files that are there now."""
        folder = self.run / f"checkpoints/step-{number:06d}"
        body = json.loads(json.loads((folder / "manifest.json").read_text())["manifest"])
        for name, entry in body["files"].items():
            content = (folder / name).read_bytes()
            entry |= {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        text = json.dumps(body, indent=1)
        listed = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": text}
        (folder / "manifest.json").write_text(json.dumps(listed))


def sealed(line: Line) -> Line:
    """A line with the hash that belongs to its content."""
    line["hash"] = line_hash(line)
    return line


def chained(lines: list[Line]) -> None:
    """Give all lines the hashes that belong to their contents, as one who knows how it is done."""
    previous = FIRST
    for line in lines:
        line["previous"] = previous
        previous = sealed(line)["hash"]


def change_reward(copy: Copy) -> None:
    copy.change_samples(lambda lines: lines[5].update(reward=1.0 - lines[5]["reward"]))


def change_reward_and_row(copy: Copy) -> None:
    def change(lines: list[Line]) -> None:
        lines[5]["reward"] = 1.0 - lines[5]["reward"]
        column = lines[5]["row"]["columns"]["rewards"]
        column[3] = base64.b64encode(bytes([0, 0, 128, 63]) if lines[5]["reward"] else bytes(4)).decode()

    copy.change_samples(change)


def change_token_in_row(copy: Copy) -> None:
    def change(lines: list[Line]) -> None:
        column = lines[0]["row"]["columns"]["tokens"]
        tokens = bytearray(base64.b64decode(column[3]))
        tokens[0] ^= 1
        column[3] = base64.b64encode(tokens).decode()

    copy.change_samples(change)


def change_token(copy: Copy) -> None:
    copy.change_samples(lambda lines: lines[0]["tokens"]["text"].__setitem__(0, "?"))


def take_checkpoint_of_other_step(copy: Copy) -> None:
    shutil.rmtree(copy.run / "checkpoints/step-000002/policy")
    shutil.copytree(copy.run / "checkpoints/step-000004/policy", copy.run / "checkpoints/step-000002/policy")
    copy.list_again()


def take_checkpoint_of_other_run(copy: Copy) -> None:
    shutil.rmtree(copy.run / "checkpoints/step-000004")
    shutil.copytree(copy.other / "checkpoints/step-000004", copy.run / "checkpoints/step-000004")


def flip_bit(copy: Copy) -> None:
    content = bytearray(copy.weights().read_bytes())
    content[-3] ^= 1
    copy.weights().write_bytes(content)


def flip_bit_and_list_again(copy: Copy) -> None:
    flip_bit(copy)
    copy.list_again()


def name_changed_checkpoint(copy: Copy) -> None:
    """A weight and all hashes of files change, but the digest of the weights in the line of the step stays."""
    content = bytearray(copy.weights().read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    name = next(name for name in header if name.startswith("weights."))
    content[8 + int.from_bytes(content[:8], "little") + header[name]["data_offsets"][0]] ^= 1
    copy.weights().write_bytes(content)
    copy.list_again()
    manifest = (copy.run / "checkpoints/step-000002/manifest.json").read_bytes()

    def change(lines: list[Line]) -> None:
        for line in lines:
            if "step-000002" in line.get("checkpoints", {}):
                line["checkpoints"]["step-000002"] = hashlib.sha256(manifest).hexdigest()
        chained(lines)

    copy.change_proof(change)


def change_recipe(copy: Copy) -> None:
    text = (copy.run / "config.yaml").read_text()
    assert "learning_rate: 0.003" in text
    (copy.run / "config.yaml").write_text(text.replace("learning_rate: 0.003", "learning_rate: 0.001"))


def change_recipe_of_checkpoint(copy: Copy) -> None:
    file = copy.run / "checkpoints/step-000004/recipe.yaml"
    file.write_text(file.read_text().replace("seed: 0", "seed: 1"))
    copy.list_again(4)


def change_plan(copy: Copy) -> None:
    text = (copy.run / "plan.json").read_text()
    (copy.run / "plan.json").write_text(text.replace('"world_size": 1', '"world_size": 2'))


def add_line_of_other_run(copy: Copy) -> None:
    other = lines_of(copy.other / "proof.jsonl")
    copy.change_proof(lambda lines: lines.__setitem__(2, other[2]))


def take_proof_of_other_run(copy: Copy) -> None:
    shutil.copy(copy.other / "proof.jsonl", copy.run / "proof.jsonl")


def change_loss(copy: Copy) -> None:
    copy.change_lines("metrics.jsonl", lambda lines: lines[1].update({"policy/loss": 0.5}))


def change_loss_in_both(copy: Copy) -> None:
    change_loss(copy)

    def change(lines: list[Line]) -> None:
        lines[1]["numbers"]["policy/loss"] = 0.5
        chained(lines)

    copy.change_proof(change)


def change_accuracy(copy: Copy) -> None:
    copy.change_lines("metrics.jsonl", lambda lines: lines[1].update({"reward/mean": 0.99}))


def change_library(copy: Copy) -> None:
    copy.change_proof(lambda lines: lines[1]["libraries"].update(torch="2.0.0"))


def change_library_and_hash(copy: Copy) -> None:
    def change(lines: list[Line]) -> None:
        lines[1]["libraries"]["torch"] = "2.0.0"
        sealed(lines[1])

    copy.change_proof(change)


def change_digest_of_weights(copy: Copy) -> None:
    def change(lines: list[Line]) -> None:
        lines[1]["weights"]["policy"]["after"] = "0" * 16
        chained(lines)

    copy.change_proof(change)


def cut_everything_but_checkpoints(copy: Copy) -> None:
    copy.change_proof(lambda lines: lines.__delitem__(slice(2, None)))
    copy.change_lines("metrics.jsonl", lambda lines: lines.__delitem__(slice(2, None)))


def remove_samples(copy: Copy) -> None:
    (copy.run / "samples/step-000003.rank-0.jsonl").unlink()


def spoil_line(copy: Copy) -> None:
    path = copy.run / "proof.jsonl"
    path.write_text(path.read_text().replace('"step": 3', '"step" 3'))


KINDS: Mapping[str, tuple[Callable[[Copy], object], str, int | None]] = {
    "a reward in the record": (change_reward, "rows", 3),
    "a reward in the record and in its row": (change_reward_and_row, "rows", 3),
    "a token in the record": (change_token, "samples", 3),
    "a token in its row": (change_token_in_row, "rows", 3),
    "a response in the record": (
        lambda copy: copy.change_samples(lambda some: some[2].update(response="42")),
        "samples",
        3,
    ),
    "an advantage in the record": (
        lambda copy: copy.change_samples(lambda some: some[2].update(advantage=9.0)),
        "rows",
        3,
    ),
    "a sample less": (lambda copy: copy.change_samples(lambda some: some.pop()), "samples", 3),
    "a sample twice": (lambda copy: copy.change_samples(lambda some: some.append(some[0])), "samples", 3),
    "no samples of a step": (remove_samples, "samples", 3),
    "the checkpoint of another step": (take_checkpoint_of_other_step, "checkpoint", 2),
    "the checkpoint of another run": (take_checkpoint_of_other_run, "checkpoint", 4),
    "a bit of a weight": (flip_bit, "checkpoint", 2),
    "a bit of a weight, and the list of files": (flip_bit_and_list_again, "checkpoint", 2),
    "a bit of a weight, and all hashes": (name_changed_checkpoint, "checkpoint", 2),
    "the recipe": (change_recipe, "recipe", 4),
    "the recipe of a checkpoint": (change_recipe_of_checkpoint, "checkpoint", 4),
    "the plan": (change_plan, "plan", 4),
    "a line less": (lambda copy: copy.change_proof(lambda some: some.pop(1)), "chain", 3),
    "no first line": (lambda copy: copy.change_proof(lambda some: some.pop(0)), "chain", 2),
    "two lines in another order": (
        lambda copy: copy.change_proof(lambda some: some.insert(1, some.pop(2))),
        "chain",
        3,
    ),
    "a line twice": (lambda copy: copy.change_proof(lambda some: some.insert(1, some[0])), "chain", 1),
    "a version of a library": (change_library, "chain", 2),
    "a version of a library, and the line's hash": (change_library_and_hash, "chain", 3),
    "the digest of weights, and all hashes": (change_digest_of_weights, "chain", 3),
    "the last lines": (lambda copy: copy.change_proof(lambda some: some.__delitem__(slice(2, None))), "end", 3),
    "the last lines and metrics": (cut_everything_but_checkpoints, "end", 3),
    "a line of another run": (add_line_of_other_run, "chain", 3),
    "the proof of another run": (take_proof_of_other_run, "recipe", 4),
    "a loss": (change_loss, "metrics", 2),
    "a loss, its line and all hashes": (change_loss_in_both, "metrics", 2),
    "another metric": (change_accuracy, "metrics", 2),
    "no metrics of a step": (lambda copy: copy.change_lines("metrics.jsonl", lambda some: some.pop(1)), "metrics", 2),
    "a line that is not JSON": (spoil_line, "chain", None),
}
"""Kinds of changes after the fact, each with the check that finds it first and the step that it names."""


def forge(copy: Copy, change: Callable[[list[Line]], object], step: int = 3) -> None:
    """Change samples of a step, and all sums and hashes of the proof, as a run could have written them itself."""
    name = f"samples/step-{step:06d}.rank-0.jsonl"
    copy.change_lines(name, change)
    samples = lines_of(copy.run / name)
    rows = [(RecordedRow.from_json(one["row"]), one) for one in samples]
    recorded = RowSum.of([row.hash(one["sample_id"], one["group_id"]) for row, one in rows])
    written = RowSum.of([text_hash(text) for text in (copy.run / name).read_text().splitlines()])

    def prove(lines: list[Line]) -> None:
        lines[step - 1] |= {"recorded": recorded.to_json(), "lines": written.to_json()}
        chained(lines)

    copy.change_proof(prove)


def set_number(sample: Line, name: str, value: float, place: int = 0) -> None:
    column = sample["row"]["columns"][name]
    data = bytearray(base64.b64decode(column[3]))
    data[4 * place : 4 * place + 4] = struct.pack("f", value)
    column[3] = base64.b64encode(data).decode()


def forge_reward(samples: list[Line]) -> None:
    for sample in samples:
        sample["reward"] = 1.0 - sample["reward"]
        set_number(sample, "rewards", sample["reward"])
        (detail,) = sample["details"].values()
        detail["value"] = sample["reward"]


def forge_number(samples: list[Line], name: str, column: str, by: float) -> None:
    for sample in samples:
        sample[name] += by
        set_number(sample, column, sample[name])


def forge_response(samples: list[Line]) -> None:
    for sample in samples:
        sample["response"] += " "


def forge_log_probs(samples: list[Line]) -> None:
    for sample in samples:
        set_number(sample, "rollout_log_probs", -20.0)


FORGED: Mapping[str, tuple[Callable[[list[Line]], object], str]] = {
    "a reward": (forge_reward, "rewards"),
    "the sum of rewards": (partial(forge_number, name="reward", column="rewards", by=1.0), "rewards"),
    "a response": (forge_response, "texts"),
    "an advantage": (partial(forge_number, name="advantage", column="advantages", by=0.25), "advantages"),
    "a log-prob": (forge_log_probs, "log-probs"),
}
"""Numbers that a run could have written wrong from the beginning, and the check that computes them again."""
