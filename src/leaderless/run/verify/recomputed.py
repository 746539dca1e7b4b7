"""What is computed again of some recorded samples: texts, rewards, advantages and log-probs."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leaderless.base.values import Json
from leaderless.config import Recipe, RecipeError
from leaderless.observability.run_directory import RunDirectory, list_checkpoints
from leaderless.planner.graph.adapters import CONFIG_FILE
from leaderless.planner.workflow import load_recipe
from leaderless.rewards.protocol import AnyReward, RewardInput, compute, describe, takes_batch
from leaderless.rewards.registry import make_rewards
from leaderless.rollout.engine import PROBE_TOLERANCE
from leaderless.run.verify.advantages import TOLERANCE, GroupMember, group_advantages, why_not
from leaderless.run.verify.findings import ProofFinding
from leaderless.run.verify.proof_lines import ProofLine
from leaderless.run.verify.sample_checks import RecordedSample
from leaderless.stages.reward import response_in, transcripts
from leaderless.worker.checkpoint.export import export_model
from leaderless.worker.checkpoint.reader import read_role_state

TEXTS, REWARDS, ADVANTAGES, LOG_PROBS = "texts", "rewards", "advantages", "log-probs"
_OF_PRODUCTS: Mapping[str, Collection[str]] = {"text": (TEXTS, REWARDS, ADVANTAGES, LOG_PROBS)}
"""What is computed again by the product of a run: all where samples hold what the policy was asked and has answered."""


def recompute(
    directory: RunDirectory, lines: Sequence[ProofLine], samples: Sequence[RecordedSample], num_rows: int, seed: str
) -> Iterator[ProofFinding]:
    """Compute some samples again; which ones follows from the seed, the hash of the last line."""
    if not num_rows or not samples:
        why = "--rows is 0" if samples else "no recorded samples hold"
        yield from (ProofFinding(name, "not checked", why) for name in (TEXTS, REWARDS, ADVANTAGES, LOG_PROBS))
        return
    try:
        recipe = load_recipe(directory.config).recipe
    except RecipeError as error:
        why = f"config.yaml cannot be read here: {error}"
        yield from (ProofFinding(name, "not checked", why) for name in (TEXTS, REWARDS, ADVANTAGES, LOG_PROBS))
        return
    chance = random.Random(seed)  # noqa: S311 - known to all who check the run
    chosen = sorted(chance.sample(range(len(samples)), min(num_rows, len(samples))))
    some = [samples[place] for place in chosen]
    checks: Mapping[str, Callable[[], ProofFinding]] = {
        TEXTS: lambda: _check_texts(directory, recipe, some),
        REWARDS: lambda: _check_rewards(recipe, some),
        ADVANTAGES: lambda: _check_advantages(recipe, samples, some),
        LOG_PROBS: lambda: _check_log_probs(directory, recipe, lines, some, samples),
    }
    known = _OF_PRODUCTS.get(recipe.product, (ADVANTAGES,))
    why = f"only of runs without environments and bodies: this is one of {recipe.product}"
    yield from (check() if name in known else ProofFinding(name, "not checked", why) for name, check in checks.items())


def _fails(check: str, sample: RecordedSample, detail: str) -> ProofFinding:
    said = f"sample {sample.sample_id}: {detail}"
    return ProofFinding(check, "fails", said, step=sample.step, rank=sample.rank)


def _check_texts(directory: RunDirectory, recipe: Recipe, samples: Sequence[RecordedSample]) -> ProofFinding:
    """Check that responses are the texts of their tokens, by the tokenizer of a checkpoint."""
    folders = [
        folder for path in list_checkpoints(directory.checkpoints) for folder in sorted(path.glob("*/tokenizer.json"))
    ]
    if not folders:
        return ProofFinding(TEXTS, "not checked", "no checkpoint has a tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folders[-1].parent, trust_remote_code=False)
    num_checked = 0
    for sample in samples:
        tokens = None if sample.row is None else sample.row.values("tokens")
        if tokens is None:
            continue
        (transcript,) = transcripts(tokenizer, [[int(token) for token in tokens]], recipe)
        if response_in(transcript) != sample.record.get("response"):
            return _fails(TEXTS, sample, "its response is not the text of its tokens")
        num_checked += 1
    return ProofFinding(TEXTS, "holds", f"the responses of {num_checked} samples are the texts of their tokens")


def _check_rewards(recipe: Recipe, samples: Sequence[RecordedSample]) -> ProofFinding:
    """Grade responses again, by the rewards of the recipe that depend on nothing but the response and its row."""
    options = recipe.reward.options()
    left = dict.fromkeys(recipe.reward.judges(), "asks a model")
    try:
        rewards = make_rewards(recipe.reward.without_judges(), in_worker=True)
    except (RecipeError, ValueError, ImportError) as error:
        return ProofFinding(REWARDS, "not checked", f"the rewards cannot be made here: {error}")
    left |= {name: "grades a batch" for name, one in rewards.items() if takes_batch(one)}
    num_values = 0
    for sample in samples:
        details = sample.record.get("details")
        found = details if isinstance(details, Mapping) else {}
        values: dict[str, float] = {}
        for name, detail in found.items():
            value = detail.get("value") if isinstance(detail, Mapping) else None
            if not isinstance(value, int | float):
                continue
            values[name] = float(value)
            if name in left or name not in rewards:
                left.setdefault(name, "is no reward of the recipe")
                continue
            now = _graded(recipe, rewards[name], sample)
            if isinstance(now, str):
                left[name] = now
            elif not math.isclose(now, value, rel_tol=1e-9, abs_tol=1e-12):
                return _fails(REWARDS, sample, f"'{name}' gave {value:g}, and gives {now:g} now")
            else:
                num_values += 1
        total = math.fsum(options[name].weight * value for name, value in values.items() if name in options)
        reward = sample.record.get("reward")
        is_whole = values.keys() == found.keys() and values.keys() <= options.keys() and bool(values)
        if is_whole and not math.isclose(total, float(cast("float", reward)), rel_tol=1e-6, abs_tol=1e-9):
            return _fails(REWARDS, sample, f"its reward is {reward}, but its parts add up to {total:g}")
    said = f"{num_values} values of {len(samples)} samples"
    said += "".join(f"; '{name}' was not graded again: it {why}" for name, why in left.items())
    return ProofFinding(REWARDS, "holds" if num_values else "not checked", said)


def _graded(recipe: Recipe, reward: AnyReward, sample: RecordedSample) -> float | str:
    """The value of a response now, or why it cannot be graded from what is recorded."""
    record = sample.record
    row: dict[str, Json] = {}
    for config in recipe.data.train_sets().values():
        row |= {config.prompt: record.get("prompt")}
        row |= {config.answer: record.get("answer")} if config.answer else {}
    asked = RewardInput(
        record.get("prompt"),
        str(record.get("response")),
        record.get("answer"),
        row,
        is_truncated=record.get("is_truncated") is True,
    )
    try:
        (outcome,) = compute(reward, [asked])
    except Exception as error:  # noqa: BLE001 - a user's code, which may need columns that are not recorded
        return f"fails on what is recorded ({describe(error)})"
    return outcome.error or outcome.value


def _check_advantages(
    recipe: Recipe, samples: Sequence[RecordedSample], chosen: Sequence[RecordedSample]
) -> ProofFinding:
    """Compute the advantages of some samples again, from the rewards of their groups, which are recorded whole."""
    if reason := why_not(recipe):
        return ProofFinding(ADVANTAGES, "not checked", reason)
    groups: dict[tuple[int, int], list[RecordedSample]] = {}
    for sample in samples:
        groups.setdefault((sample.step, sample.group_id), []).append(sample)
    num_checked, largest = 0, 0.0
    for sample in chosen:
        group = groups[sample.step, sample.group_id]
        own = None if sample.row is None else sample.row.values("advantages")
        known = [(one, one.number("rewards"), one.number("reward_valid")) for one in group]
        if not own or any(reward is None or valid is None for _, reward, valid in known):
            continue  # there was no room for the rows of the whole group
        good = [(one, float(reward or 0.0)) for one, reward, valid in known if valid]
        members = [GroupMember(reward, _length(one)) for one, reward in good]
        found = group_advantages(members, recipe.algorithm.advantage)
        wanted = next((value for (one, _), value in zip(good, found, strict=True) if one is sample), 0.0)
        for value in own:
            difference = abs(value - wanted) / max(1.0, abs(wanted))
            if not difference <= TOLERANCE:
                return _fails(ADVANTAGES, sample, f"an advantage is {value:g}, its formula gives {wanted:g}")
            largest = max(largest, difference)
        num_checked += 1
    if not num_checked:
        return ProofFinding(ADVANTAGES, "not checked", "no group is recorded byte by byte, with advantages")
    return ProofFinding(ADVANTAGES, "holds", f"those of {num_checked} samples differ by at most {largest:.1e}")


def _length(sample: RecordedSample) -> int:
    tokens = None if sample.row is None else sample.row.values("tokens")
    return len(tokens or ())


def _check_log_probs(
    directory: RunDirectory,
    recipe: Recipe,
    lines: Sequence[ProofLine],
    chosen: Sequence[RecordedSample],
    samples: Sequence[RecordedSample],
) -> ProofFinding:
    """Score some samples again with the weights of the checkpoint that sampled them, by transformers, in float32."""

    def left(why: str) -> ProofFinding:
        return ProofFinding(LOG_PROBS, "not checked", why)

    if recipe.samples_truncated:
        return left("only of texts whose tokens were drawn from all words")
    roles = [role for line in lines for role in line.weights]
    versions = {line.step: line.versions[0] for line in lines if line.versions and line.versions[0] == line.versions[1]}
    for path in reversed(list_checkpoints(directory.checkpoints)):
        for role in dict.fromkeys(roles):
            state = read_role_state(path, role)
            if state is None or state.is_value_model:
                continue
            steps = [step for step, version in versions.items() if version == state.policy_version]
            known = [one for one in (*chosen, *samples) if one.step in steps and one.row is not None]
            of_step = {one.sample_id: one for one in known if one.row and one.row.values("prompt_tokens")}
            if of_step:
                return _score(path, role, recipe, [*of_step.values()][: len(chosen)])
    return left("no checkpoint has the weights that have sampled a recorded step")


def _score(path: Path, role: str, recipe: Recipe, samples: Sequence[RecordedSample]) -> ProofFinding:
    config = recipe.model_of(role)
    tolerance = PROBE_TOLERANCE["float32" if config is None else config.compute_dtype]
    with tempfile.TemporaryDirectory(prefix="leaderless-") as folder:
        try:
            source = export_model(path, role, Path(folder) / "model", merge=(path / role / CONFIG_FILE).exists())
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
        except (RecipeError, OSError, ValueError, RuntimeError) as error:
            return ProofFinding(LOG_PROBS, "not checked", f"the model of {path.name} cannot be loaded here: {error}")
        differences: list[float] = []
        for sample in samples:
            own = _differences(model, sample, recipe.as_seen_by(role).rollout.temperature)
            mean = math.fsum(own) / max(1, len(own))
            if not mean <= tolerance:
                said = f"its log-probs differ by {mean:.2g} on average from those of {path.name}, above {tolerance:g}"
                return _fails(LOG_PROBS, sample, said)
            differences += own
    mean, most = math.fsum(differences) / max(1, len(differences)), max(differences, default=0.0)
    said = f"of {len(samples)} samples and {path.name}, in float32: mean difference {mean:.1e}, largest {most:.1e}"
    return ProofFinding(LOG_PROBS, "holds", f"{said}; {tolerance:g} on average is allowed")


@torch.no_grad()
def _differences(model: torch.nn.Module, sample: RecordedSample, temperature: float) -> list[float]:
    """Distance of the log-prob of each token from the one in the run."""
    assert sample.row is not None
    prompt, tokens = (sample.row.values(name) or [] for name in ("prompt_tokens", "tokens"))
    known = sample.row.values("rollout_log_probs") or []
    words = torch.tensor([[int(token) for token in (*prompt, *tokens)]])
    logits = model(input_ids=words).logits[0, len(prompt) - 1 : -1].float() / temperature
    found = logits.log_softmax(-1).gather(1, words[0, len(prompt) :, None])[:, 0]
    return [abs(one - other) for one, other in zip(found.tolist(), known, strict=True)]
