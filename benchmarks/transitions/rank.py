"""One rank of the run: reshards rows on request, our way or through a controller over gloo."""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.transitions import gloo, packed
from benchmarks.transitions.case import Case, Order
from benchmarks.transitions.channel import Channel
from benchmarks.transitions.contents import Contents
from benchmarks.transitions.padded import contents, pad, share_out
from benchmarks.transitions.watch import Observation, Observations, Watch

from leaderless.data.batch import SIBLING_BITS, Batch
from leaderless.data.buffer.reshard import reshard
from leaderless.distributed.transport import Transport

TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", type=int, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    if dist.get_rank() != options.host:
        raise RuntimeError(f"rank {dist.get_rank()} runs on host {options.host}: they must be the same")
    transport = Transport(torch.device("cpu"), TIMEOUT_S)
    channel = Channel.connect(options.socket, f"rank {options.host}")
    for line in channel:
        order = Order.model_validate_json(line)
        channel.send(Observations([observe(order, transport)]).model_dump_json())
    dist.destroy_process_group()


def observe(order: Order, transport: Transport) -> Observation:
    """One transition, as this rank sees it."""
    match order.way:
        case "ours":
            return observe_ours(order.case, transport)
        case "gloo":
            return observe_gloo(order.case, transport)
        case "packed":
            return observe_packed(order.case, transport)
        case "ray":
            raise ValueError("ray: no rank takes part in that; tell the controller")


def observe_ours(case: Case, transport: Transport) -> Observation:
    """The project's own way: directly from holder to owner."""
    rank = transport.rank
    held = case.make_rows(rank)
    wanted = None
    if case.same_shares and rank in case.action.target_layout:
        place = case.action.target_layout.shard_of(rank)
        shares = share_out(case.prompt_lengths_of_rows, case.response_lengths, case.action.target_layout.dp)
        ids = case.ids[shares[place]]
        prompts = torch.arange(case.prompts)
        wanted = Batch(ids, {}, Batch(prompts), torch.bitwise_right_shift(ids, SIBLING_BITS))
    action = replace(case.action, is_late=case.same_shares)
    with Watch(dist.barrier) as watch:
        got = reshard(action, transport.world, held, wanted)
    return watch.observation(rank, Contents.of_batch(held), Contents.of_batch(got))


def observe_gloo(case: Case, transport: Transport) -> Observation:
    """Padded tables, gathered and scattered by one rank."""
    rows = case.make_rows(transport.rank)
    held = None if rows is None else pad(case, rows)
    del rows  # as if they had been padded from the beginning
    with Watch(dist.barrier) as watch:
        got = gloo.through_controller(case, transport.rank, held)
    return watch.observation(transport.rank, contents(held), contents(got))


def observe_packed(case: Case, transport: Transport) -> Observation:
    """The same without padding."""
    rows = case.make_rows(transport.rank)
    held = None if rows is None else packed.flat(rows)
    del rows
    with Watch(dist.barrier) as watch:
        got = packed.through_controller(case, transport.rank, held)
    return watch.observation(transport.rank, Contents.of_batch(held), Contents.of_batch(got))


if __name__ == "__main__":
    main()
