"""Runs the commands of the documentation as a reader would, page by page, on two cores and without a network.

A page's blocks are executed from top to bottom, by one shell, in a folder that has what a copy of the repository has.
Trainings end after a step, and models and datasets of the hub are replaced by tiny ones. What a page takes for
granted, such as an earlier run, is made first. The command `leaderless` is the working tree's; it is forked from a
process that has imported everything. `NOT_RUN` has the commands that cannot be executed, each with a reason.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.forking import Forked
from tests.pages import PAGES, ROOT, blocks_of
from tests.tiny import tiny_model

TIMEOUT_S = 1800
"""Longest time for the commands of a page."""
NETWORK, MACHINES, LATER = "downloads packages", "needs several machines", "takes minutes or more, and is not a command"
NOT_RUN: Mapping[str, str] = {
    "pip install": NETWORK,
    "python -m venv": NETWORK,
    "python3 -m venv": NETWORK,
    "python3.12 -m venv": NETWORK,
    "apt-get install": NETWORK,
    "trl-venv/bin/pip": NETWORK,
    "/opt/vllm/bin/pip": NETWORK,
    "/opt/megatron/bin/pip": NETWORK,
    ".venv-libero/bin/pip": NETWORK,
    ".venv-maniskill/bin/pip": NETWORK,
    ".venv/bin/pre-commit install": "changes the repository's hooks",
    ".venv/bin/python -m pytest": "runs the tests, of which this is one",
    "make ": f"{LATER} of the package; another test looks for the targets",
    "python benchmarks/": f"{LATER} of the package",
    "torchrun --nnodes=4": MACHINES,
    "leaderless doctor /shared/runs --nodes 4": MACHINES,
    "leaderless train recipes/gsm8k/grpo.yaml --nodes 2:4": MACHINES,
    "leaderless train recipes/gsm8k/grpo.yaml layout.rollout.ranks=0-15": MACHINES,
    "srun ": MACHINES,
    "docker ": "needs Docker and GPUs",
    "trap ": MACHINES,
    "wait": MACHINES,
    "leaderless robot serve franka": "needs an arm",
    "leaderless reward recipes/judges/grpo.yaml": "needs a model that can judge; other tests have a server that does",
    "leaderless eval runs/quickstart --with lm-eval": "needs lm-eval and its data; `make test-evals` has both",
    "leaderless log runs/quickstart --to wandb": "needs an account of a tracker",
}
"""Commands that are not executed, by how they begin, and why not."""
PORTS = {"leaderless serve": 8000, "leaderless retriever": 8000, "leaderless ui": 7860, "leaderless robot serve": 8765}
"""Commands that go on until they are stopped, and the ports at which the following ones find them."""


@dataclass(frozen=True)
class Given:
    """What a page takes for granted.

    Attributes:
        before: Commands, to be executed first.
        files: Files of the reader, by name.
        replaced: Values that only stand for those of a reader, and others in their place.
        more: Settings of training commands, to make them short.
    """

    before: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    more: Sequence[str] = ()


VERL = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=gsm8k.jsonl data.prompt_key=question \\
    actor_rollout_ref.model.path=MODEL actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4 \\
    data.train_batch_size=8 data.max_prompt_length=64 data.max_response_length=8 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=4 custom_reward_function.path=score.py
"""
TRL = """
model_name_or_path: MODEL
dataset_name: gsm8k.jsonl
reward_funcs: score.length
num_generations: 4
per_device_train_batch_size: 4
max_completion_length: 8
max_steps: 2
"""
GUESS = "examples/environment/recipe.yaml"
HELD_OUT_GUESSES = "data.evaluation.path=runs/guess-data/tasks.jsonl evaluation.max_prompts=4 evaluation.every_steps=1"
GIVEN: Mapping[str, Given] = {
    "docs/concepts/episodes.md": Given(
        before=(
            "python examples/environment/guess.py",
            f"leaderless train {GUESS} name=NAME 'reward={{format: {{pattern: \"5\"}}}}' {HELD_OUT_GUESSES}",
        ),
        files={"other.yaml": "reward: {format: {pattern: '4'}}\n"},
        replaced={"--step 12 --episode 786435": "--step 1 --episode 0", "exact_match.weight": "format.weight"},
    ),
    "docs/reference/asynchrony.md": Given(
        before=("leaderless train recipe.yaml name=first --workers 2",),
        files={
            "recipe.yaml": (ROOT / "recipes/quickstart/grpo.yaml").read_text(encoding="utf-8")
            + "channels: {rollout: {capacity: 2, mode: continuous}}\n"
            + "layout: {rollout: {ranks: 0}, "
            + ", ".join(f"{node}: {{ranks: 1}}" for node in ("reward", "old", "reference", "advantage", "policy"))
            + "}\n"
        },
        replaced={"run.follow=first": "run.follow=first --workers 2"},
    ),
    "docs/guides/eight-gpus.md": Given(more=("rollout.engine=native", "rollout.external.python=null")),
    "docs/guides/from-trl.md": Given(
        files={
            "grpo.yaml": TRL,
            "score.py": "def length(completions, **columns):\n    return [float(len(one)) for one in completions]\n",
        }
    ),
    "docs/guides/from-verl.md": Given(
        files={
            "run_qwen3-8b.sh": VERL,
            "score.py": "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
            "    return float(len(solution_str))\n",
        }
    ),
    "docs/guides/lora.md": Given(before=("leaderless train recipes/quickstart/lora.yaml name=my-run",)),
    "docs/guides/many-machines.md": Given(before=("mkdir -p shared/runs",)),
    "docs/guides/online.md": Given(replaced={"programmer": "programmer --steps 2"}),
    "docs/guides/reward-models.md": Given(
        before=("python -m examples.preferences.prepare", "leaderless train recipes/preferences/reward_model.yaml")
    ),
    "docs/guides/robots.md": Given(more=("'body.options.addresses=[127.0.0.1:8765]'",)),
    "docs/guides/search.md": Given(
        before=(
            "python -m examples.search.prepare",
            "leaderless train recipes/agents/search/sft.yaml",
            "leaderless export runs/search-sft runs/earlier",
        ),
        replaced={"'environment.options=": "name=served models.policy=runs/earlier 'environment.options="},
        more=("evaluation.max_prompts=4",),
    ),
    "docs/guides/serve.md": Given(replaced={'"quickstart"': '"tiny"'}),
    "docs/guides/ui.md": Given(before=("mkdir -p shared/runs",)),
}


@dataclass(frozen=True)
class Done:
    """Outcome of the commands of a page.

    Attributes:
        code: Exit code of the shell, which ends at the first command that fails.
        output: Everything that was printed, with the place of each block before what its commands print.
    """

    code: int
    output: str


def pages_with_commands() -> list[Path]:
    """The English pages with shell blocks; Chinese ones repeat them."""
    return [page for page in PAGES if not page.name.endswith(".zh.md") and shell_blocks(page)]


def shell_blocks(page: Path) -> list[tuple[str, list[str]]]:
    """The blocks of a page with a command that is executed: the place of each, and its lines."""
    found = []
    for block in blocks_of(page):
        lines = [line for line in block.text.replace("\\\n", " ").splitlines() if not reason_for(line)]
        if block.language == "shell" and any(line.strip() and not line.startswith("#") for line in lines):
            found.append((str(block), lines))
    return found


def reason_for(line: str) -> str | None:
    """The reason why a command is not executed, or None if it is."""
    return next((reason for begin, reason in NOT_RUN.items() if line.startswith(begin)), None)


def free_port() -> int:
    """A port that no other process listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Reader:
    """A reader who follows a page in a folder."""

    def __init__(self, page: Path, folder: Path, runs: Path | None) -> None:
        """Make the folder: what a copy of the repository has, and the runs of the quickstart, if they are given."""
        self.page, self.folder = page, folder
        self.given = GIVEN.get(str(page.relative_to(ROOT)), Given())
        self.ports = {str(port): str(free_port()) for port in {*PORTS.values()}}
        self.model = str(folder / "tiny")
        self.num_steps = 1
        folder.mkdir()
        shutil.copytree(tiny_model(chat_template=CHAT), self.model)
        config = Path(self.model, "config.json")
        longer = json.loads(config.read_text(encoding="utf-8")) | {"max_position_embeddings": 2048}
        config.write_text(json.dumps(longer), encoding="utf-8")
        for name in ("examples", "recipes", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)
        if runs is not None:
            shutil.copytree(runs, folder / "runs")
        asked = [(f"What is {n}+{n}?", f"{n}+{n} is #### {2 * n}") for n in range(16)]
        rows = [
            {"prompt": one, "question": one, "answer": other, "data_source": "openai/gsm8k"} for one, other in asked
        ]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        for name, text in {"gsm8k.jsonl": lines, **self.given.files}.items():
            (folder / name).write_text(text.replace("MODEL", self.model), encoding="utf-8")

    def follow(self) -> Done:
        """Execute the blocks of the page, until a command fails."""
        parts = [("before", self.given.before), *shell_blocks(self.page)]
        script = [PREAMBLE]
        for place, lines in parts:
            script += [f"echo '=== {place}'", "set -x", *map(self.rewritten, lines), "{ set +x; } 2> /dev/null"]
        with (self.folder / "log").open("w+b") as log, installed(self.folder / "bin"):
            shell = subprocess.Popen(
                ["bash", "-c", "\n".join(script)],
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = shell.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                code = 124
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)  # with what the shell has left in the background
                shell.wait()
            log.seek(0)
            return Done(code, log.read().decode(errors="replace"))

    def environment(self) -> dict[str, str]:
        """Environment of a reader: the working tree is what is installed."""
        return os.environ | {
            "PATH": os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT / "src"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def rewritten(self, line: str) -> str:
        """A line with tiny models and short trainings, and with a server in the background."""
        for theirs, ours in self.given.replaced.items():
            line = line.replace(theirs, ours)
        line = re.sub(r"(?:Qwen/[\w.-]+|/models/[\w.-]+)", self.model, line)
        line = re.sub(r"(?<![\w.])/shared/runs", "shared/runs", line)
        if re.match(r"leaderless (train|eval|profile)", line):
            line = re.sub(r"--workers [3-9]", "--workers 2", line)
        line = re.sub(r"(runs/[\w-]+/checkpoints)/step-\d+", r"$(ls -d \1/step-* | tail -n 1)", line)
        for documented, port in self.ports.items():
            line = re.sub(rf"(?<=--port ){documented}\b", port, line)
        server = next((name for name in PORTS if re.match(rf"(\w+=\S+ )?{name}\b", line)), None)
        if server is not None:
            port = self.ports[str(PORTS[server])]
            words = re.sub(r"\s+(#.*|&)?$", "", line.replace("--host 0.0.0.0", "--host 127.0.0.1"))
            return f"server {port} {words}" + ("" if "--port" in words else f" --port {port}")
        command = re.search(
            r"leaderless (train|eval|profile|quickstart|plan(?=.*--layout auto))\b.*?(?=\s+(?:#|&)|$)", line
        )
        if command is not None:
            line = f"{line[: command.end()]} {' '.join(self.settings(command))}{line[command.end() :]}"
        for documented, port in self.ports.items():
            line = re.sub(rf"(?<=127\.0\.0\.1:){documented}\b", port, line)
        return line

    def settings(self, command: re.Match[str]) -> list[str]:
        """Settings that make a command short."""
        settings = ["loggers=[]", *self.given.more]
        if re.search(r"leaderless train (runs/|recipes/quickstart/grpo)", command[0]) and " name=" not in command[0]:
            self.num_steps += 1  # the run of the quickstart continues
            settings.append(f"steps={self.num_steps}")
        elif command[1] != "eval":
            settings.append("steps=1")
        if "recipes/gsm8k/" in command[0]:
            data = "{path: gsm8k.jsonl, prompt: question, answer: answer}"
            settings += [f"'data.train={data}'", f"'data.evaluation={data}'", "models.policy.compute_dtype=float32"]
            settings += ["batch.prompts_per_step=8", "batch.updates_per_step=1", "rollout.max_response_tokens=8"]
            settings += ["--fresh"] if command[1] == "train" else []  # a page shows several ways to begin
            if "models.policy" not in command[0]:
                settings.append(f"models.policy.path={self.model}")
        return settings


CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PREAMBLE = """
set -e
curl() { command curl --fail --silent --show-error "$@"; }
server() {
    { set +x; } 2> /dev/null
    if [ -n "$pid" ]; then kill -INT "$pid" || true; wait "$pid" || true; fi
    port=$1; shift
    env "$@" & pid=$!
    for _ in $(seq 600); do
        if (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then set -x; return 0; fi
        kill -0 "$pid" || return 1
        sleep 0.2
    done
    return 1
}
"""
"""Defines `server PORT COMMAND`, which runs in the background in place of an earlier one, and answers by then."""


CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.connect({address!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(asked, [request], [0, 1, 2])
pid = int(asked.recv(64))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(asked.recv(64))
sys.exit(code if code >= 0 else 128 - code)
"""
"""A program that has another process do its work, with its own arguments, folder, variables and streams."""


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """A folder with the command `leaderless`, while this process can fork it."""
    folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, TemporaryDirectory() as short:
        address = f"{short}/asked"  # the path of a socket may have 107 characters
        listener.bind(address)
        listener.listen()
        (folder / "leaderless").write_text(CLIENT.format(python=sys.executable, address=address), encoding="utf-8")
        (folder / "leaderless").chmod(0o755)
        accepting = threading.Thread(target=_accept, args=(listener,))
        accepting.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _accept(listener: socket.socket) -> None:
    """Fork whoever asks, until the listener is shut down, and then end what still runs."""
    threads = []
    while True:
        try:
            asked, _ = listener.accept()
        except OSError:
            break
        content, streams, _, _ = socket.recv_fds(asked, 1 << 20, 3)
        words, folder, environment = json.loads(content)
        process = Forked(
            [sys.executable, "-m", "leaderless", *words],
            cwd=folder,
            env=environment,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
        )
        for stream in streams:
            os.close(stream)
        asked.send(str(process.pid).encode())
        threads.append(threading.Thread(target=_attend, args=(asked, process)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _attend(asked: socket.socket, process: Forked) -> None:
    """Report the exit code of a process; end it if nobody waits for it any more."""
    with asked:
        while process.poll() is None:
            if select.select([asked], [], [], 0.05)[0]:  # the other side has closed
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()
                process.wait()
        with suppress(OSError):
            asked.send(str(process.returncode).encode())
