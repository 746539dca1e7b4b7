"""Makes a recipe of another framework's configuration."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from leaderless.algorithms.losses import POLICY_LOSSES
from leaderless.base.errors import closest
from leaderless.cli.convert_config import trl, trl_preferences, verl
from leaderless.cli.convert_config.table import NotTakenError, Row, Values
from leaderless.cli.convert_config.verl_names import with_names_of_rows
from leaderless.config import RecipeError
from leaderless.config.source import RecipeSource, Setting, apply_overrides, path_of, read_yaml, with_setting
from leaderless.run.settings import leaves_of

Framework = Literal["verl", "trl", "trl-dpo", "trl-kto", "trl-reward"]
"""Kinds of configurations; `trl` is GRPO."""
TABLES: Mapping[Framework, Sequence[Row]] = {
    "verl": verl.ROWS,
    "trl": trl.ROWS,
    "trl-dpo": trl_preferences.DPO_ROWS,
    "trl-kto": trl_preferences.KTO_ROWS,
    "trl-reward": trl_preferences.REWARD_ROWS,
}
_PROGRAM = re.compile(r"verl\.trainer\.main_\w+|recipe\.\w+\.main_\w+")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_MACHINERY = re.compile(
    r"(.*\.)?(agent|checkpoint|checkpoint_engine|engine_kwargs|fsdp_config|fused_kernel_options|global_profiler|mtp|"
    r"megatron|profiler|prometheus|router_replay|sandbox_fusion|tiled_mlp|trace|transfer_queue|ray_kwargs)\..*"
)
"""Keys of verl that say how it runs, not what it computes."""
BASE: Mapping[str, Mapping[str, Setting]] = {
    "verl": {},
    "trl": {"workflow": "grpo", "algorithm.advantage.type": "grpo", "algorithm.advantage.epsilon": 1e-4},
    **trl_preferences.BASES,
}
"""Settings that hold in each framework, whatever its configuration says."""
PLACEHOLDER_STEPS = 100
MEANS_OF_RESPONSES = ("gspo", "gmpo")
MEAN_OF_RESPONSES = "sequence_mean_token_mean"
_EVERY = "evaluation.every_steps"
_LOSS, _AGGREGATION = "algorithm.policy_loss.", "algorithm.aggregation"


class Left(NamedTuple):
    """A key of the other framework that was not taken over, its value, and the reason, with what to do."""

    key: str
    value: Setting
    reason: str


@dataclass(frozen=True)
class Converted:
    """A recipe, and what it lacks."""

    settings: Mapping[str, Setting]  # by nested section
    taken: Sequence[str]  # keys of the configuration that were taken over
    needless: Sequence[str]  # keys whose effect is there without a setting
    left: Sequence[Left]

    def text(self, origin: str) -> str:
        """The recipe as YAML, with what it lacks as comments."""
        lines = [f"# Converted from {origin} by leaderless convert."]
        lines += [f"# not taken over: {left.key}={left.value!r}: {left.reason}" for left in self.left]
        return "\n".join(lines) + "\n" + yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True)


def read_configuration(path: Path) -> Mapping[str, Setting]:
    """The settings of a configuration by dotted key: a YAML file, or a shell script that starts verl with overrides.

    Raises:
        RecipeError: The file cannot be read.
    """
    if path.suffix != ".sh":
        return _by_dotted_key(read_yaml(path))
    try:
        text = path.read_text(encoding="utf-8")
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except (OSError, ValueError) as error:
        raise RecipeError.at("", f"{path} cannot be read: {error}") from error
    begin = next((number for number, word in enumerate(words) if _PROGRAM.fullmatch(word)), None)
    if begin is None:
        raise RecipeError.at("", f"{path} starts no verl.trainer.main_...: give a YAML file, or such a script")
    variables = {"HOME": str(Path.home())}
    variables |= dict(word.split("=", 1) for word in words[:begin] if re.match(r"\w+=", word))
    overrides = []
    for word in words[begin + 1 :]:
        if not re.match(r"[+~]*[\w.]+=", word):
            if "=" not in word and word not in {"$@", "--config-path", "--config-name"} and not word.startswith("-"):
                break
            continue
        overrides.append(_VARIABLE.sub(lambda found: variables.get(found[1], found[0]), word.lstrip("+~")))
    return _by_dotted_key(apply_overrides(RecipeSource({}, {(): str(path)}), overrides))


def _by_dotted_key(source: RecipeSource) -> Mapping[str, Setting]:
    return {".".join(path): value for path, value in leaves_of(source.settings)}


def guess(values: Values) -> Framework:
    """The framework, and of TRL the trainer, that a configuration is for: the one that has most of its keys and values.

    Raises:
        RecipeError: It is neither verl's nor TRL's, or fits several trainers.
    """
    known = {name: _fit(values, name) for name in TABLES}
    most = max(known.values())
    best = [name for name, fit in known.items() if fit == most]
    if not most[0]:
        raise RecipeError.at(
            "",
            "no key of verl or TRL is in the file: give the configuration of verl.trainer.main_ppo, or of trl grpo, "
            "dpo, kto or reward",
        )
    if len(best) > 1:
        raise RecipeError.at("", f"the file may be for any of {', '.join(best)}: say which with --from")
    return best[0]


def _fit(values: Values, framework: Framework) -> tuple[int, int]:
    """How many keys of a configuration a framework has, and how many of them can be taken over."""
    values = with_names_of_rows(values)[0] if framework == "verl" else values
    rows = [row for row in TABLES[framework] if row.theirs in values]
    complete, num_taken = _complete(values, framework, 1), 0
    for row in rows:
        try:
            row.made(values[row.theirs], complete)
        except NotTakenError:
            continue
        num_taken += 1
    return len(rows), num_taken


def _complete(values: Values, framework: Framework, workers: int) -> Values:
    """The settings of a configuration, with the framework's defaults for those that are not given."""
    defaults = {row.theirs: row.default for row in TABLES[framework] if row.default is not None}
    if framework == "verl":
        return defaults | dict(values)
    theirs = {row.theirs for row in TABLES[framework]}
    return defaults | {key: one for key, one in values.items() if key in theirs} | {trl.PROCESSES: workers}


def convert(values: Values, framework: Framework, workers: int = 1) -> Converted:
    """Make a recipe of settings by dotted key.

    Args:
        values: Settings of the other framework; those that are not given have its defaults.
        framework: The other framework.
        workers: Number of its processes, which TRL's batch sizes depend on.
    """
    rows = {row.theirs: row for row in TABLES[framework]}
    values, given_as = with_names_of_rows(values) if framework == "verl" else (values, {})
    complete = _complete(values, framework, workers)
    made, left, taken, needless = dict(BASE[framework]), list(_unknown(values, rows)), [], []
    for key, row in rows.items():
        is_given = key in values
        if not is_given and row.default is None and row.convert is not verl.reward_of:
            continue
        value = complete.get(key)
        if is_given and not row.ours and row.convert is None:
            if row.is_needless or value is None or value is False:
                needless.append(key)
            else:
                left.append(Left(key, value, row.meaning))
            continue
        try:
            made |= {name: one for name, one in row.made(value, complete).items() if one is not None}
        except NotTakenError as error:
            left.append(Left(key, value, str(error)))
        else:
            taken += [key] if is_given else []
    nested = RecipeSource({}, {})
    for name, one in _finished(made, values, framework, left).items():
        nested = with_setting(nested, path_of(name), one, "")
    left = [Left(given_as.get(one.key, one.key), one.value, one.reason) for one in left]
    return Converted(nested.settings, taken, needless, left)


def _finished(
    made: dict[str, Setting], values: Values, framework: Framework, left: list[Left]
) -> Mapping[str, Setting]:
    """Complete what a recipe needs, and remove what does not go together."""
    if framework not in trl_preferences.TABLES:
        made = _with_policy_loss(made, values, framework, left)
    if made.get("algorithm.advantage.type") != "grpo":
        made.pop("algorithm.advantage.normalize_by_std", None)
    if "data.evaluation.path" in made and framework == "verl":
        made["data.evaluation.prompt"] = made.get("data.train.prompt", "prompt")
        made["data.evaluation.source"] = made.get("data.train.source", "data_source")
    if "data.evaluation.path" not in made:
        made = {key: one for key, one in made.items() if not key.startswith(("data.evaluation.", _EVERY))}
    if "steps" not in made:
        key = "trainer.total_epochs" if framework == "verl" else "num_train_epochs"
        if key not in values:
            reason = f"steps={PLACEHOLDER_STEPS} is a placeholder: set epochs x rows / batch.prompts_per_step"
            left.append(Left("steps", None, reason))
        made["steps"] = PLACEHOLDER_STEPS
    order = ("name", "workflow", "models", "data", "reward", "batch", "rollout", "algorithm", "optimizer", "roles")
    place = {section: number for number, section in enumerate(order)}
    return dict(sorted(made.items(), key=lambda item: place.get(item[0].partition(".")[0], len(order))))


def _with_policy_loss(
    made: dict[str, Setting], values: Values, framework: Framework, left: list[Left]
) -> dict[str, Setting]:
    """Complete the loss of the policy, and leave out what it does not have."""
    loss = str(made.setdefault("algorithm.policy_loss.type", "ppo"))
    fields = POLICY_LOSSES[loss].model_fields
    made = {key: one for key, one in made.items() if not key.startswith(_LOSS) or key.removeprefix(_LOSS) in fields}
    if loss in MEANS_OF_RESPONSES and made.get(_AGGREGATION) != MEAN_OF_RESPONSES:
        if framework == "trl":  # verl's losses of this kind take no notice of the setting
            reason = "a ratio of a whole response goes with a mean over responses, loss_type=grpo, which was taken"
            left.append(Left("loss_type", values.get("loss_type", "dapo"), reason))
        made[_AGGREGATION] = MEAN_OF_RESPONSES
    return made


def _unknown(values: Values, rows: Mapping[str, Row]) -> Iterator[Left]:
    """Keys that no row is about, but for those that are off, that refer to another key, or that are machinery."""
    off = [] if values.get("algorithm.adv_estimator", "gae") == "gae" else ["critic."]
    off += [] if values.get("reward_model.enable") else ["reward_model.", "reward.reward_model."]
    for key, value in values.items():
        is_off = value is None or value is False or str(value).startswith("${") or key.startswith(tuple(off))
        if key not in rows and not is_off and not key.endswith("_target_") and not _MACHINERY.fullmatch(key):
            near = closest(key, list(rows), 0.85)
            yield Left(key, value, f"not known{f' (did you mean {near}?)' if near else ''}: look for it in the guide")
