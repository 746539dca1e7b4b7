"""A part of `benchmarks/gpu.py`: new weights on their way from trainers to engines."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from gpu_machine import Machine, Result, num_weights
from leaderless.base.devices import DeviceSetup, setup_device
from leaderless.distributed.remote import child_server
from leaderless.distributed.remote.child_server import IMPORT, ChildServer
from leaderless.distributed.remote.messages import Settings
from leaderless.distributed.transport import Transport
from leaderless.distributed.weights.blocks import Pool, shard_rows
from leaderless.distributed.weights.copies import begin_copy
from leaderless.models.causal_lm import empty_causal_lm
from leaderless.planner import Layout
from leaderless.rollout.external import vllm_engine
from leaderless.rollout.external.engine import ExternalEngine
from leaderless.rollout.weight_sources import Colocated, held_by
from leaderless.training.fsdp import FsdpEngine
from leaderless.worker.build.join import join_nobody, meet
from leaderless.worker.rank_info import RankInfo

KEEPER = """
import torch
from leaderless.rollout.external.vllm_process import server
from leaderless.distributed.weights.buckets import checksums

class Keeper:
    def __init__(self, settings):
        self.weights, self.sums = {}, []

    def start(self):
        pass

    def load_bucket(self, weights, data, adapter, is_checked):
        own = data.clone()
        copied = torch.cuda.Event() if own.is_cuda else None
        if copied:
            copied.record()
        self.sums.append(checksums(own[None]))
        for weight in weights:
            self.weights.setdefault(weight.name, weight.view(own).clone()).copy_(weight.view(own))
        if copied:
            copied.synchronize()

    def finish_load(self, policy_version, adapter, expected):
        assert torch.cat(self.sums).tolist() == expected
        self.sums.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def wake(self):
        pass

    def sleep(self, keep_weights):
        pass

server.VllmWorker = Keeper
"""
"""Code that gives an engine in another process a worker that copies weights into its own memory, and no more."""


def weights(machine: Machine) -> Result:
    """New weights on their way to engines, as in each step of a run, from all GPUs of the machine to all of them."""
    count = torch.cuda.device_count() if machine.device.type == "cuda" else 1
    with machine.model_folder() as folder, tempfile.TemporaryDirectory(prefix="gpu-weights-") as own:
        if count > 1:
            torch.multiprocessing.spawn(weights_on_rank, (count, machine, folder, own), count)
        else:
            weights_on_rank(0, count, machine, folder, own)
        found: Result = json.loads((Path(own) / "found.json").read_text(encoding="utf-8"))
    return found


def weights_on_rank(rank: int, count: int, machine: Machine, folder: str, own: str) -> None:
    """Sharded weights, gathered for an engine in each process and one next to it, and copied for a channel."""
    is_cuda = machine.device.type == "cuda"
    device = setup_device(rank, count) if is_cuda else DeviceSetup(machine.device, "gloo")
    store, limit = Path(own) / "store", timedelta(seconds=60)
    if count > 1:
        meet(RankInfo(rank, count, rank, count, store), device, limit)
    else:
        join_nobody(device, limit)
    try:
        here = replace(machine, device=device.device)
        world = Transport(device.device, limit.total_seconds()).world
        trainer = here.trainer_of(folder, world)
        pool, seconds = Pool(Layout(world.ranks, count), shard_rows), {}
        num_bytes = num_weights(empty_causal_lm(here.config(folder), "policy")) * here.dtype.itemsize
        result: Result = {"bytes": num_bytes, "ranks": count, "seconds": seconds}
        native = here.native(here.sampler(folder), "pages")
        for name, engine in (("native", native), ("apart", keeper(here, own, rank))):
            seconds[name] = here.seconds(partial(bring, Colocated(engine, trainer, pool, here.dtype), trainer))
            engine.close()
            if rank == 0:
                here.say(result)
        held = held_by(trainer)
        copied = here.seconds(lambda: begin_copy(held, here.dtype).wait())
        here.synchronize()
        begin = time.perf_counter()
        copy = begin_copy(held, here.dtype)
        host = time.perf_counter() - begin
        copy.wait()
        if rank == 0:
            result |= {"copy_s": copied, "copy_host_s": host}
            (Path(own) / "found.json").write_text(json.dumps(result), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def bring(serving: Colocated, trainer: FsdpEngine) -> None:
    """Give an engine the weights of another update."""
    trainer.policy_version += 1
    with serving.phase() as engine:
        assert engine.policy_version == trainer.policy_version


def keeper(machine: Machine, folder: str, rank: int) -> ExternalEngine:
    """An engine in another process that does all that vLLM's server does with weights, except for vLLM's part."""
    child_server.IMPORT = f"{IMPORT}{KEEPER}"
    settings = Settings("", None, False, machine.config_dtype, 1, 1, 0.5, None, enable_graphs=False)
    server = ChildServer("the keeper of weights", Path(folder) / f"keeper-{rank}.log", 60, 60, lambda: None)
    driver = vllm_engine.VllmServer(sys.executable, settings, machine.device, server)
    return ExternalEngine("keeper", driver, None, frozenset(), 1.0, machine.device, None)  # type: ignore[arg-type]
