"""A Slurm cluster of this machine alone, with its own keys, ports and folders; needs root and Debian's packages."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 MaxTime=60 GraceTime=120
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF MaxTime=60
"""


def missing() -> str:
    """What this machine lacks for a cluster of its own; empty if nothing."""
    if not os.environ.get("LEADERLESS_CLUSTERS"):
        return "takes minutes: make test-clusters"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"needs {', '.join(lacking)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "needs root, which Slurm's services run as here"


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start the services; yields the environment in which Slurm's programs find them."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    host = socket.gethostname()
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, host=host, ports=_free_ports(2)))
    environment = os.environ | {"SLURM_CONF": str(config)}
    places = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("pid-file", "log-file", "seed-file")]
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *places]
    services: list[subprocess.Popen[bytes]] = []
    try:
        for command in (munge, ["slurmctld", "-D", "-f", str(config)], ["slurmd", "-D", "-f", str(config)]):
            with (folder / f"{command[0]}.out").open("wb") as out:
                services.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            time.sleep(1)
        _wait_for_node(environment)
        yield environment
    finally:
        for service in reversed(services):
            service.terminate()
            try:
                service.wait(10)
            except subprocess.TimeoutExpired:
                service.kill()
                service.wait()


def call(environment: dict[str, str], *command: str) -> str:
    """Output of one of Slurm's programs."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def _wait_for_node(environment: dict[str, str]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False)
        if "idle" in done.stdout:
            return
        time.sleep(0.5)
    raise AssertionError(f"the node has not come up: {done.stdout}{done.stderr}")


def _free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports
