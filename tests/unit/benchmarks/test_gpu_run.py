"""A call of the benchmark for GPUs: what runs at the same time, what is kept, and what is printed at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu import conftest

from leaderless.rollout.native.paged_engine import PagedOptions

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))  # as when they are run
import gpu
import gpu_call
import gpu_machine
import gpu_needs
import gpu_ready
import gpu_screen
from gpu_call import RECORD, Call, Part
from gpu_machine import MARK, PRESETS, Machine
from gpu_processes import Ended, Job, descendants, run_together
from gpu_rollout import generation

BENCHMARKS = Path(gpu.__file__).parent
SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]
FACTS = {"device": "H100", "python": "3.12.3", "packages": {"torch": "2.11.0", "triton": "3.6.0"}, "free_bytes": 9e10}


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def together(jobs: Mapping[str, tuple[Sequence[str], float]], logs: Path, **variables: str) -> dict[str, Ended]:
    found: dict[str, Ended] = {}
    made = [Job(name, command, limit_s, logs, variables) for name, (command, limit_s) in jobs.items()]
    run_together(made, logs, lambda ended: found.update({ended.job.name: ended}))
    return found


def test_processes_run_at_the_same_time_and_none_hides_another(tmp_path: Path) -> None:
    meets = "touch %s; while ! test -e %s; do sleep 0.05; done; echo met; exit %d"
    first = (["sh", "-c", meets % ("a", "b", 0)], 30.0)
    second = (["sh", "-c", meets % ("b", "a", 3)], 30.0)
    found = together({"first": first, "second": second}, tmp_path)
    assert [found[name].output for name in ("first", "second")] == ["met\n", "met\n"]
    assert [found[name].problem for name in ("first", "second")] == ["", "exit code 3"]


def test_a_process_that_hangs_prints_its_stack_and_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    program = tmp_path / "src/leaderless/stuck.py"
    program.parent.mkdir(parents=True)
    program.write_text(
        "import subprocess, time\n"
        "def wait_for_ever():\n"
        "    own = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "    print(own.pid, flush=True)\n"
        "    time.sleep(60)\n"
        "wait_for_ever()\n"
    )
    found = together({"stuck": ([sys.executable, str(program)], 5.0)}, tmp_path, PYTHONFAULTHANDLER="1")["stuck"]
    assert found.is_stopped
    assert found.problem.startswith("stopped after ")
    lines = gpu_screen.described_parts([("stuck-tiny", found.problem, found.output)])
    assert lines[0].startswith("FAILS stuck-tiny: stopped after ")
    assert lines[-1] == "  at leaderless/stuck.py:5 wait_for_ever < leaderless/stuck.py:6 <module>"
    assert not is_alive(int(found.output.split()[0])), "it was in a session of its own"


CALLER = """
import json, sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from gpu_processes import Job, StoppedError, end_descendants, run_together, stopped_by_signals
logs = Path(sys.argv[1])
program = "echo begun; echo > {{}}.pid; setsid sleep 60"
jobs = [Job(name, ["sh", "-c", program.format(name)], 60, logs) for name in ("a", "b")]
with stopped_by_signals():
    try:
        run_together(jobs, logs, lambda end: print(end.job.name, end.is_stopped, end.output.strip(), flush=True))
    except StoppedError as stopped:
        end_descendants()
        print("kept after", stopped, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_parts_and_loses_nothing(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", CALLER.format(folder=str(BENCHMARKS)), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as caller:
        while not all((tmp_path / f"{name}.pid").exists() and descendants(caller.pid)[3:] for name in "ab"):
            time.sleep(0.05)
        started = descendants(caller.pid)
        caller.send_signal(number)
        caller.send_signal(number)
        output, _ = caller.communicate(timeout=30)
    assert output.splitlines() == ["a True begun", "b True begun", f"kept after {number.name}"]
    assert len(started) == 4
    assert not any(is_alive(pid) for pid in started)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A call of which the parts are programs of the test."""
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(gpu_ready, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu_ready, "KERNELS", tmp_path / "work/kernels")
    made = Call("measure", "cuda", tmp_path / "gpu.json", is_tiny=False, slowness=1.0)
    made.facts, made.sizes = dict(FACTS), ("1.5B", 12288)
    return made


def programs(call: Call, monkeypatch: pytest.MonkeyPatch, **texts: str) -> list[list[str]]:
    """Let parts be shell programs, and note the real commands."""
    commands = list[list[str]]()

    def command(part: Part) -> tuple[Sequence[str], dict[str, str]]:
        words, own = Call._part_command(call, part)
        commands.append([*words[2:], *(f"{name}={value}" for name, value in own.items())])
        return ("sh", "-c", texts[part.name]), own

    monkeypatch.setattr(call, "_part_command", command)
    return commands


SAYS = """echo 'MEASURED {"speed": 1}'; echo 'MEASURED {"speed": 2}'; """


def test_each_result_is_kept_as_soon_as_it_is_known(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    call.results.write_text('{"parts": {"weights": {"bytes": 5}}}')
    look = f"cat {call.results} 2>&1; "
    texts = {"speeds": f"{SAYS}echo 'MEASURED {{\"spee'; exit 3", "attention": look + SAYS, "training": "sleep 60"}
    commands = programs(call, monkeypatch, **texts)
    monkeypatch.setitem(gpu.LIMITS_S, "training", 0.5)
    gpu.measure(call, ["speeds", "attention", "training"])
    kept = json.loads(call.results.read_text())["parts"]
    assert kept["weights"] == {"bytes": 5}
    assert kept["environment"]["device"] == "H100"
    assert (kept["speeds"]["speed"], kept["speeds"]["problem"]) == (2, "exit code 3"), "the last line was cut off"
    assert '"problem": "exit code 3"' in call.ended[Part("attention", "1.5B", is_real=True)].output
    assert "problem" not in kept["attention"]
    assert kept["attention"]["device"] == "H100"
    assert kept["training"]["error"].startswith("stopped after ")
    assert json.loads((call.out / "gpu.json").read_text())["parts"] == kept
    assert commands[0] == ["speeds", "cuda:0", "1.5B", "12288"]
    assert commands[2][-1] == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert not any("PYTORCH" in word for command in commands[:2] for word in command), "weights are sent from them"
    assert call.failed_parts == [Part("speeds", "1.5B", is_real=True), Part("training", "1.5B", is_real=True)]


def test_a_failure_does_not_replace_what_was_measured_on_the_same_device(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"speeds": {"flops": 1.0, "device": "H100"}, "attention": {"seconds": 1.0, "device": "H200"}}
    call.results.write_text(json.dumps({"parts": known}))
    programs(call, monkeypatch, speeds="exit 1", attention="exit 1")
    gpu.measure(call, ["speeds", "attention"])
    kept = json.loads(call.results.read_text())["parts"]
    assert kept["speeds"] == known["speeds"]
    assert kept["attention"]["error"] == "exit code 1"
    assert call.notes == ["speeds has failed, and gpu.json keeps what was measured before"]


def test_what_is_not_known_of_this_device_is_measured_first(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: {"device": "H100"} for name in ("speeds", "generation", "weights")}
    other = {"attention": {"device": "H200"}, "decoding": {"device": "H100", "problem": "stopped"}}
    call.results.write_text(json.dumps({"parts": {**known, **other}}))
    commands = programs(call, monkeypatch, **dict.fromkeys(gpu.MEASURED, SAYS))
    gpu.measure(call, [])
    expected = ["attention", "decoding", "agreement", "training", "training", "speeds", "generation", "weights"]
    assert [command[0] for command in commands] == expected
    assert [command[2:4] for command in commands[3:5]] == [["1.5B", "12288"], ["0.5B", "8192"]]
    kept = json.loads(call.results.read_text())["parts"]
    assert kept["training"]["seconds_in_all"] >= 0 <= kept["training@0.5B"]["seconds_in_all"]
    call.sizes = ("0.5B", 4096)
    commands.clear()
    gpu.measure(call, [])
    assert [command[2:4] for command in commands if command[0] == "training"] == [["0.5B", "4096"]], "once"


def test_a_part_may_have_a_size_of_its_own(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = programs(call, monkeypatch, weights="exit 1")
    gpu.measure(call, ["weights@7B"])
    assert commands == [["weights", "cuda:0", "7B", "4096"]]
    assert json.loads((call.out / RECORD).read_text())["failed_parts"] == [["weights@7B", True]]
    assert [*json.loads(call.results.read_text())["parts"]] == ["weights@7B", "environment"]
    call.facts["free_bytes"] = 6e10
    gpu.measure(call, ["weights@7B"])
    assert call.notes == ["weights@7B was not run: no model fits into the memory that is free"]


def test_parts_for_which_there_is_no_time_or_memory_are_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(call, monkeypatch, speeds="sleep 1; " + SAYS)
    call.real_s = gpu.LEAST_S + 0.5
    gpu.measure(call, ["speeds", "attention"])
    assert call.notes == ["attention was not run: no time was left; measure attention runs it"]
    call.sizes = None
    gpu.measure(call, ["speeds"])
    assert call.notes[1:] == ["speeds was not run: no model fits into the memory that is free"]


def test_retry_runs_the_tests_that_are_found(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "tests/gpu"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text(Path(conftest.__file__).read_text())
    (folder / "test_a.py").write_text(CRASHES)
    for module in (gpu, gpu_ready, gpu_call):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    programs(call, monkeypatch, training=SAYS)
    names = ["test_a.py::test_alike[2]", "test_a.py::test_good", "test_a.py::test_gone", "test_b.py::test_x"]
    gpu.retry(call, [f"tests/gpu/{name}" for name in names])
    assert {(one["test"], one["outcome"]) for one in call.tests if one["outcome"] != "started"} == {
        ("tests/gpu/test_a.py::test_alike[2]", "failed"),
        ("tests/gpu/test_a.py::test_good", "passed"),
    }
    assert call.notes == [f"tests/gpu/{name} was not found, or had not begun" for name in names[2:]]


def all_parts(call: Call, monkeypatch: pytest.MonkeyPatch, **texts: str) -> tuple[list[list[str]], list[list[str]]]:
    """Let all parts and the tests be programs; their commands, and the names of the tests."""
    commands, ids = programs(call, monkeypatch, **{**dict.fromkeys(gpu.LIMITS_S, SAYS), **texts}), list[list[str]]()

    def tests(names: Sequence[str]) -> tuple[Sequence[str], dict[str, str]]:
        ids.append([*names])
        lines = [json.dumps({"test": name, "outcome": "failed", "text": "E   KeyError: 'x'"}) for name in names]
        return ("sh", "-c", f"echo '{';'.join(lines)}' > /dev/null; exit 1"), {}

    monkeypatch.setattr(call, "_tests_command", tests)
    return commands, ids


def test_smoke_tries_all_at_once_and_then_decodes(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, ids = all_parts(call, monkeypatch, training="exit 1")
    gpu.smoke(call, [])
    assert ids == [[]]
    assert commands == [
        [name, "cuda:0", "tiny", *["PYTORCH_ALLOC_CONF=expandable_segments:True"] * (name == "training")]
        for name in gpu.TINY
    ] + [["decoding", "cuda:0", "1.5B", "12288"]]
    assert {*json.loads(call.results.read_text())["parts"]} == {"environment", "tests", "decoding"}
    commands, _ = all_parts(call, monkeypatch, decoding="exit 1")
    call.ended.clear()
    gpu.smoke(call, [])
    assert commands[-1][2] == "tiny", "a step that fails with a tiny model is not tried with a large one"


def test_retry_takes_what_the_last_call_has_left(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_ready, "ROOT", tmp_path)
    record = {
        "failed_tests": ["tests/gpu/test_paged.py::test_one"],
        "failed_parts": [["weights", False], ["decoding", True]],
    }
    (tmp_path / f".{RECORD}").write_text(json.dumps(record))
    commands, ids = all_parts(call, monkeypatch)
    gpu.retry(call, [])
    assert ids == [["tests/gpu/test_paged.py::test_one"]]
    assert [(command[0], command[2]) for command in commands] == [
        ("weights", "tiny"),
        ("decoding", "1.5B"),
        ("training", "1.5B"),
    ]
    commands, ids = all_parts(call, monkeypatch)
    gpu.retry(call, ["attention"])
    assert ids == []
    assert [(command[0], command[2]) for command in commands] == [("attention", "tiny"), ("training", "1.5B")]
    assert "tests" not in json.loads(call.results.read_text())["parts"], "some tests are not the tests"
    for content in ("cut off", "{}", "[]"):
        (tmp_path / f".{RECORD}").write_text(content)
        commands, _ = all_parts(call, monkeypatch)
        gpu.retry(call, [])
        assert [command[0] for command in commands] == ["training"]
        assert call.notes[-1].startswith(f".{RECORD} cannot be read (")
    (tmp_path / f".{RECORD}").unlink()
    commands, _ = all_parts(call, monkeypatch)
    gpu.retry(call, [])
    assert [command[0] for command in commands] == ["training"]
    assert call.notes[-1].startswith(f"no {RECORD} was brought")


def test_a_record_of_a_call_names_what_has_failed(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    all_parts(call, monkeypatch, attention="exit 1")
    call.outcomes.write_text(
        '{"test": "tests/gpu/test_a.py::b", "outcome": "started", "text": ""}\n{"test": "tests/gpu'
    )
    call.run({Part("attention", "tiny"): 5, Part("speeds", "tiny"): 5})
    record = json.loads((call.out / RECORD).read_text())
    assert record["failed_parts"] == [["attention", False]]
    assert record["failed_tests"] == ["tests/gpu/test_a.py::b"]
    assert record["parts"]["speeds-tiny"]["speed"] == 2


def test_names_of_a_command_are_checked() -> None:
    assert gpu.parsed(["retry", "tests/gpu/test_paged.py::test_one[a b]", "weights"]).names[1] == "weights"
    for wrong in (["measure", "decode"], ["smoke", "decoding"], ["gpu"]):
        with pytest.raises(SystemExit):
            gpu.parsed(wrong)


CRASHES = """
import pytest

def below(x):
    return {}[x]

@pytest.mark.parametrize("x", [1, 2, 3])
def test_alike(x): below("key")

def test_other(): assert [1, 2] == [1, 3]

def test_good(): pass

def test_left_out(): pytest.skip("one GPU")

def test_of_a_rank():
    raise AssertionError('failed:\\n  File "/x/src/leaderless/training/fsdp.py", line 7, in step\\nValueError: y')
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What pytest writes of some tests, in two processes, one file of which cannot be imported."""
    root = tmp_path_factory.mktemp("outcomes")
    folder = root / "tests/gpu"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text(Path(conftest.__file__).read_text())
    (folder / "test_a.py").write_text(CRASHES)
    (folder / "test_broken.py").write_text("import no_such_package\n")
    (folder / "test_compiled.py").write_text("def test_slow(): pass\n")
    path = root / "outcomes.jsonl"
    options = ["-n", "2", "--dist", "load", "--maxschedchunk", "1", "--tb=short", "--continue-on-collection-errors"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", "-q", *options],
        cwd=root,
        env={**os.environ, conftest.VARIABLE: str(path)},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_outcomes_of_tests_are_known_as_they_end(outcomes: list[dict[str, Any]]) -> None:
    assert gpu_screen.counts(outcomes) == {"passed": 2, "failed": 5, "errors": 1, "skipped": 1, "unfinished": 0}
    begun = [one["test"] for one in outcomes if one["outcome"] == "started"]
    assert "tests/gpu/test_compiled.py::test_slow" in begun[:2], "in which a compiler works"
    lines = gpu_screen.described_tests(outcomes)
    text = "\n".join(lines)
    alike = sorted(line.split()[-1] for line in lines if "test_alike" in line and "::" in line)
    assert alike == [f"tests/gpu/test_a.py::test_alike[{x}]" for x in (1, 2, 3)]
    assert text.count("KeyError: 'key'") == 1, "what fails alike is told once"
    assert "  at tests/gpu/test_a.py:5 below < tests/gpu/test_a.py:8 test_alike" in lines
    assert "ModuleNotFoundError: No module named 'no_such_package'" in text
    assert "  ValueError: y" in lines
    assert any("leaderless/training/fsdp.py:7 step" in line for line in lines)
    assert "  assert [1, 2] == [1, 3]" in text
    unfinished = [*outcomes, {"test": "tests/gpu/test_a.py::test_long", "outcome": "started", "text": ""}]
    assert gpu_screen.described_tests(unfinished)[-2:] == [
        "FAILS tests/gpu/test_a.py::test_long",
        "  had begun and not ended",
    ]


def test_the_last_lines_hold_what_has_failed_and_what_was_measured(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], outcomes: list[dict[str, Any]]
) -> None:
    frames = (
        'File "/r/src/leaderless/distributed/weights/route.py", line 9, in send',
        'File "/v/site-packages/x/tests/x.py", line 3, in f',
    )
    raises = f"printf '%s\\n' '{frames[0]}' '{frames[1]}' 'RuntimeError: out of luck'; exit 1"
    long = f"""echo 'MEASURED {{"a": 0.123456789, "planned": {{"b": 1}}, "text": "{"x" * 5000}"}}'"""
    all_parts(call, monkeypatch, weights=raises, timeline=long)
    many = [
        {
            **outcomes[-1],
            "test": f"tests/gpu/test_many.py::{n}",
            "outcome": "failed",
            "text": f"E   KeyError: {n}" + 300 * "y",
        }
        for n in range(80)
    ]
    call.outcomes.write_text("".join(json.dumps(one) + "\n" for one in [*outcomes, *many]))
    gpu.smoke(call, [])
    call.note("the driver is too old")
    capsys.readouterr()
    call.finish()
    printed = capsys.readouterr().out
    end = printed[printed.index("== notes") :]
    assert len(end) < 12_000
    assert "the driver is too old" in end
    assert "FAILS tests/gpu/test_a.py::test_other" in end
    assert "more lines in logs.tgz" in end, "80 other failures do not fit"
    failure = "exit code 1\n  RuntimeError: out of luck\n  at leaderless/distributed/weights/route.py:9 send"
    assert f"FAILS weights-tiny: {failure}" in end
    assert 'timeline-tiny = {"a": 0.1235, "text": "xxx' in end
    assert 'decoding-1.5B = {"speed": 2' in end
    assert "weights-tiny exit code 1 " in end.splitlines()[-2]
    assert end.splitlines()[-1].startswith("measure: ")
    assert (call.out / "logs.tgz").exists()


def test_each_way_to_generate_is_said_as_soon_as_it_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = generation(Machine(torch.device("cpu"), PRESETS["tiny"]))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(MARK)]
    (line,) = [json.loads(line.removeprefix(MARK)) for line in said]
    assert [*line["tokens_per_s"]] == ["native"]
    assert [*found["tokens_per_s"]] == ["native", "transformers.generate"]
    assert line["preset"]["layers"] == 2


@pytest.mark.parametrize("name", PRESETS)
def test_the_pool_of_the_engine_leaves_room_on_the_smallest_gpu_of_a_preset(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    chosen = list[PagedOptions]()
    monkeypatch.setattr(gpu_machine, "PagedEngine", lambda *args: chosen.append(args[-1]))
    preset = PRESETS[name]
    Machine(torch.device("cpu"), preset).native(None, "pages")  # type: ignore[arg-type]
    (options,) = chosen
    per_token = 2 * preset.layers * preset.key_heads * (preset.hidden // preset.heads) * 2
    assert options.pool_tokens >= preset.prompts * (preset.prompt_tokens + 8 * preset.response_tokens)
    least = min((gib for other, _, gib in gpu_needs.NAMED if other == name), default=1)
    assert options.pool_tokens * per_token <= 0.3 * least * 2**30
