"""What three decisions of an arm with two cameras see, and noise for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from leaderless.embodied.policies.observations import padded
from leaderless.embodied.policies.protocol import BodyPolicy, Observed
from leaderless.embodied.simulators.protocol import Continuous, Spaces

ARM = Spaces({"top": (28, 28), "hand": (14, 21)}, 3, Continuous((-9.0, -9.0), (9.0, 9.0)), 10, has_instructions=True)
TEXTS = ("reach the red block", "push_it\n", "Open")


def observed(policy: BodyPolicy, texts: Sequence[str] = TEXTS) -> Observed:
    """What is seen before as many decisions as there are instructions."""
    rng = np.random.default_rng(0)
    images = {
        camera: torch.from_numpy(rng.integers(0, 256, (len(texts), *size, 3), dtype=np.uint8))
        for camera, size in ARM.images.items()
    }
    state = torch.from_numpy(rng.normal(size=(len(texts), 3)).astype(np.float32))
    return Observed(images, state, padded([policy.instruction_ids(text) for text in texts], torch.device("cpu")))


def noise(policy: BodyPolicy, num: int = 3) -> Tensor:
    return torch.rand(num, policy.noise_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def check_rows_are_alone(policy: BodyPolicy) -> None:
    """Decisions do not depend on one another, nor on how long other instructions are."""
    seen, drawn = observed(policy), noise(policy)
    whole = policy.act(seen, drawn)
    for row in range(3):
        one = seen.select(torch.tensor([row]))
        ids, lengths = one.instructions
        alone = Observed(one.images, one.state, (ids[:, : int(lengths[0])], lengths))
        acted = policy.act(alone, drawn[row : row + 1])
        torch.testing.assert_close(acted.choices[0], whole.choices[row], rtol=0, atol=1e-5)
    changed = Observed(seen.images, seen.state + 1, seen.instructions)
    assert not torch.allclose(policy.act(changed, drawn).choices, whole.choices)


def check_scores(policy: BodyPolicy, trained: set[str], sees: str) -> None:
    """Scores are the log-probs of what was drawn; some weights, and one whose name has `sees`, get a gradient."""
    seen = observed(policy)
    acted = policy.act(seen, noise(policy))
    scores = policy.score(seen, acted.choices)
    assert acted.log_probs.shape == (3, 3, 2)
    torch.testing.assert_close(acted.log_probs, scores.log_probs, rtol=0, atol=1e-4)
    scores.log_probs.sum().backward()
    gradients = {name: one.grad for name, one in policy.named_parameters() if one.grad is not None}
    assert all(bool(one.isfinite().all()) for one in gradients.values())
    moved = {name for name, one in gradients.items() if bool(one.any())}
    assert trained <= moved
    assert any(sees in name for name in moved)
    shown = policy.choices_of(acted.actions.detach())
    torch.testing.assert_close(policy.actions_of(shown), acted.actions)
    assert policy.score(seen, shown).log_probs.max().item() < 0
