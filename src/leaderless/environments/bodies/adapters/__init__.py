"""Simulators of other packages as environments of bodies, each an extra of this one. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

_HERE = "leaderless.environments.bodies.adapters"
ADAPTERS: Mapping[str, str] = {
    "babyai": f"{_HERE}.babyai:BabyAI",
    "gymnasium": f"{_HERE}.gymnasium:GymnasiumBody",
    "isaaclab": f"{_HERE}.isaaclab:IsaacLab",
    "libero": f"{_HERE}.libero:Libero",
    "maniskill": f"{_HERE}.maniskill:ManiSkill",
    "metaworld": f"{_HERE}.metaworld:MetaWorld",
    "panda": f"{_HERE}.gymnasium:Panda",
    "pusht": f"{_HERE}.gymnasium:PushT",
}
"""Adapters by the names that recipes use, each as `module:Class`."""
