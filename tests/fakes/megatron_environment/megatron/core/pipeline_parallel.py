from __future__ import annotations

import torch
import torch.distributed as dist

from . import parallel_state
from .utils import get_model_config


def get_forward_backward_func(pp_size=None, vp_size=None):
    return _forward_backward


def _forward_backward(
    *,
    forward_step_func,
    data_iterator,
    model,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length=None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step=None,
    adjust_tensor_shapes_fn=None,
    p2p_communicator=None,
    pg_collection=None,
    force_all_reduce=False,
):
    (chunk,) = model
    config, store, total = get_model_config(chunk), [], torch.tensor(0, dtype=torch.int)
    _check_counts(num_microbatches)
    assert seq_length % parallel_state.SIZES["tp"] == 0, "ranks along tp divide the sequence"
    assert config.variable_seq_lengths, "stages have to agree on the shape of each pass"
    for _ in range(num_microbatches):
        output, loss_func = forward_step_func(data_iterator, chunk)
        if not parallel_state.is_pipeline_last_stage():
            continue
        if collect_non_loss_data:
            store.append(loss_func(output, non_loss_data=True))
            continue
        loss, num_tokens, reduced = loss_func(output)
        if not config.calculate_per_token_loss:
            loss = loss / num_tokens.clamp(min=1) / num_microbatches
        total += num_tokens
        store.append(reduced)
        if not forward_only:
            loss.backward()
    if not forward_only:
        config.finalize_model_grads_func([chunk], total if config.calculate_per_token_loss else None)
    return store


def _check_counts(count: int) -> None:
    """Real stages would wait for each other for ever."""
    if parallel_state.world_size() > 1:
        counts = torch.tensor([count, -count])
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        assert counts[0] == -counts[1] == count, "processes have different numbers of passes"
