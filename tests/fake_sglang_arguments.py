"""Arguments that SGLang's server has according to its documentation, without torch, so that they are soon known."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType

VALUES = {"model-path", "host", "port", "dtype", "context-length", "max-running-requests", "load-format"}
VALUES |= {"mem-fraction-static", "sampling-defaults", "device", "base-gpu-id", "revision"}
FLAGS = {"skip-tokenizer-init", "enable-memory-saver", "enable-weights-cpu-backup", "trust-remote-code"}
VALUES |= {"max-lora-rank", "max-loras-per-batch", "max-loaded-loras", "max-prefill-tokens"}
FLAGS |= {"stream-output", "disable-cuda-graph", "enable-lora", "enable-return-routed-experts", "disable-radix-cache"}


class ServerArgs:
    """Stands in for the class of SGLang that has all arguments."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add all arguments to a parser."""
        for name in VALUES:
            parser.add_argument(f"--{name}")
        for name in FLAGS:
            parser.add_argument(f"--{name}", action="store_true")


def answer() -> bool:
    """Run the program of the command line if it asks SGLang for its arguments; whether it does."""
    program = next((one for one in sys.argv if "add_cli_args" in one), None)
    if program is not None:
        for name in ("sglang", "sglang.srt", "sglang.srt.server_args"):
            sys.modules[name] = ModuleType(name)
        vars(sys.modules["sglang"])["__version__"] = "0.0.fake"
        vars(sys.modules["sglang.srt.server_args"])["ServerArgs"] = ServerArgs
        sys.argv = ["-c", *sys.argv[sys.argv.index(program) + 1 :]]
        exec(program, {})
    return program is not None
