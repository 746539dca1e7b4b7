"""Arguments of a recipe for vLLM and SGLang, compared with those that the installed version takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

import torch

from leaderless.base.errors import closest
from leaderless.config import RecipeError
from leaderless.config.low_precision import FORMATS, INT8_WEIGHTS, LowPrecision, formats_of
from leaderless.config.rollout import ExternalConfig
from leaderless.distributed.remote.child_server import bound_command, worker_free_environment
from leaderless.planner.checks.engine_arguments import KEY, check_allowed

_VLLM = (
    "import dataclasses, json, vllm\n"
    "from vllm.engine.arg_utils import EngineArgs\n"
    "names = [one.name for one in dataclasses.fields(EngineArgs) if one.name[0] != '_']\n"
    "formats = {}\n"
    "try:\n"
    "    from typing import get_args\n"
    "    from vllm.config.cache import CacheDType\n"
    "    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES\n"
    "    formats = {'kv_cache_dtype': get_args(CacheDType), 'quantization': ONLINE_QUANT_SHORTHAND_NAMES}\n"
    "except ImportError:\n"
    "    pass\n"
    "print('\\n' + json.dumps(['vLLM ' + vllm.__version__, names, formats]))\n"
)
_SGLANG = (
    "import argparse, json, sglang\n"
    "from sglang.srt.server_args import ServerArgs\n"
    "parser = argparse.ArgumentParser(add_help=False)\n"
    "ServerArgs.add_cli_args(parser)\n"
    "options = [name for action in parser._actions for name in action.option_strings if name[:2] == '--']\n"
    "names = [name[2:].replace('-', '_') for name in options]\n"
    "choices = [action.choices for action in parser._actions if action.dest == 'kv_cache_dtype']\n"
    "formats = {'kv_cache_dtype': list(choices[0])} if choices and choices[0] else {}\n"
    "print('\\n' + json.dumps(['SGLang ' + sglang.__version__, names, formats]))\n"
)
PROGRAMS = {"vllm": _VLLM, "sglang": _SGLANG}
"""Programs that print the version of an engine, the names of all of its arguments, and its formats of low precision
by the argument that names them, as far as it can say."""


def check_installed(engine: str, external: ExternalConfig, role: str, key: str = KEY) -> str:
    """Refuse arguments that the recipe may not give, or that the installed version does not have.

    The engine is imported in its own interpreter, which takes seconds, only if there are arguments.

    Args:
        engine: Name of the engine.
        external: Section with the arguments.
        role: Role of the model.
        key: Setting at which the arguments are written.

    Returns:
        The version and the arguments, for the user; empty without arguments, or for an engine that takes none.

    Raises:
        RecipeError: An argument is refused or unknown, or the interpreter cannot import the engine.
    """
    given = external.given_arguments
    if not given or engine not in PROGRAMS:
        return ""
    check_allowed(engine, external, role, key)
    if external.addresses:
        return ""  # the engine there says which ones it takes
    version, known, formats = _installed(engine, external, key)
    for name in given:
        if name not in known:
            near = closest(name, known)
            hint = "" if near is None else f" (did you mean '{near}'?)"
            raise RecipeError.at(f"{key}.{name}", f"{version} has no argument of this name{hint}")
    for one in formats_of(engine, given):
        able = formats.get(one.argument)
        if able is not None and one.value not in able and one.value != INT8_WEIGHTS:
            named = [other.value for other in FORMATS[engine] if other.argument == one.argument and other.value in able]
            raise RecipeError.at(
                f"{key}.{one.argument}",
                f"is {one.value}, but {version} has no format of this name: choose {', '.join(named) or 'none'}, or "
                "install a version that has it",
            )
    said = ", ".join(f"{name}={json.dumps(value)}" for name, value in given.items())
    return f"{version} generates with role '{role}' and the arguments {said}"


def check_device(
    engine: str, external: ExternalConfig, device: torch.device, compute_dtype: str, role: str, key: str = KEY
) -> None:
    """Refuse formats of low precision in which a device cannot compute, before anything is loaded.

    Args:
        engine: Name of the engine.
        external: Section with the arguments.
        device: Device of the engine.
        compute_dtype: Type in which the trainer of the role computes, and weights are sent.
        role: Role of the model.
        key: Setting at which the arguments are written.

    Raises:
        RecipeError: A format is not for the device, or not for weights of this type.
    """
    for one in formats_of(engine, external.given_arguments):
        where = f"{key}.{one.argument}"
        if reason := _why_not(one, device):
            able = [
                other.value
                for other in FORMATS[engine]
                if other.argument == one.argument and not _why_not(other, device)
            ]
            choice = f"choose {', '.join(able)}, or " if able else ""
            raise RecipeError.at(where, f"is {one.value} for role '{role}', but {reason}: {choice}leave it out")
        if one.part == "weights" and compute_dtype == "float32":
            raise RecipeError.at(
                where,
                f"is {one.value}, but {engine} quantizes weights of 16 bits alone: set models.{role}.compute_dtype to "
                "bfloat16, or leave it out",
            )


def _why_not(one: LowPrecision, device: torch.device) -> str:
    """Why a device does not compute in a format; empty if it does, or cannot be asked."""
    if device.type == "cpu":
        return "" if one.is_on_cpu else f"the CPU computes this run, and {one.kind} in this form needs a GPU"
    if device.type != "cuda" or torch.version.hip is not None:
        return ""  # vLLM says so when it starts
    found = torch.cuda.get_device_capability(device)
    if found >= one.capability:
        return ""
    first, has = (".".join(map(str, pair)) for pair in (one.capability, found))
    return f"{device} ({torch.cuda.get_device_name(device)}) has compute capability {has}, and {one.kind} needs {first}"


def _installed(
    engine: str, external: ExternalConfig, key: str
) -> tuple[str, Sequence[str], Mapping[str, Sequence[str]]]:
    """The version of an engine that an interpreter has, the names of its arguments, and its formats by argument."""
    where, python = f"{key.rpartition('.')[0]}.python", shutil.which(external.python or sys.executable)
    if python is None:
        raise RecipeError.at(where, f"'{external.python}' is not a program on this machine")
    command = bound_command(python, PROGRAMS[engine])
    if external.python is None:
        command.remove("-I")  # the engine is imported as this process would do it
    limit, own = external.start_timeout_s, worker_free_environment()
    try:
        done = subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit, check=False, env=own
        )
        version, names, formats = json.loads((done.stdout.splitlines() or [""])[-1])
    except subprocess.TimeoutExpired as error:
        raise RecipeError.at(
            where, f"'{python}' has not imported {engine} within rollout.external.start_timeout_s={limit:g} s: raise it"
        ) from error
    except ValueError as error:
        reason = (done.stderr.strip().splitlines() or [f"it has ended with code {done.returncode}"])[-1]
        raise RecipeError.at(
            where, f"'{python}' cannot import {engine}, whose arguments are to be checked: {reason}"
        ) from error
    return version, names, formats
