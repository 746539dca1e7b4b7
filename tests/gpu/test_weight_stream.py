"""Weights that another process on the same device opens."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from leaderless.distributed.weights.buckets import CudaStaging, checksum, checksums, make_buckets

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RECEIVER = """
import json, sys
from leaderless.distributed.weights.buckets import checksum
from leaderless.distributed.remote.messages import SharedMemory
memory = SharedMemory()
for line in sys.stdin:
    sent = json.loads(line)
    print(checksum(memory.open(sent["place"])[: sent["bytes"]].clone()), flush=True)
"""


def test_another_process_sees_the_buckets_of_device_memory() -> None:
    device = torch.device("cuda", 0)
    weights = [(f"weight {i}", torch.randn(1000, 100, device=device)) for i in range(5)]
    staging = CudaStaging(device)
    command = [sys.executable, "-c", RECEIVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        for bucket in make_buckets(weights, torch.bfloat16, staging, max_bytes=500_000):
            expected = checksum(bucket.data)  # waits for the copies
            receiver.stdin.write(json.dumps({"place": staging.place(), "bytes": len(bucket.data)}) + "\n")
            receiver.stdin.flush()
            assert int(receiver.stdout.readline()) == expected
        receiver.stdin.close()
    assert receiver.returncode == 0
    staging.close()


def test_a_checksum_on_a_device_is_that_of_the_host() -> None:
    rows = torch.randint(0, 256, (3, 5 << 23), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert checksums(rows.cuda()).tolist() == checksums(rows).tolist()
