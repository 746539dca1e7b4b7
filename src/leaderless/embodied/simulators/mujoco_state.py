"""The whole state of an environment of MuJoCo, so that it continues bit for bit."""

from __future__ import annotations

from typing import Protocol, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from leaderless.embodied.simulators.state_packing import is_plain, pack, unpack
from leaderless.environments.adapters import needed

_OF_MODEL = ("body_mass", "body_pos", "body_quat", "geom_friction", "geom_pos", "geom_rgba", "site_pos", "site_quat")
"""Fields of models that environments change when they place things."""
_OF_CONTACTS = ("efc_", "iefc_", "island_", "map_")
"""Arrays whose sizes depend on the contacts of the moment; each step makes them anew."""


class MujocoEnvironment(Protocol):
    """An environment that has MuJoCo's model and data."""

    model: object
    data: object
    np_random: np.random.Generator


class _State(TypedDict):
    integration: NDArray[np.float64]
    arrays: dict[str, NDArray[np.generic]]
    model: dict[str, NDArray[np.generic]]
    attributes: dict[str, object]
    random: dict[str, object]


def is_mujoco(environment: object) -> bool:
    """Whether an environment has MuJoCo's model and data."""
    return all(type(getattr(environment, name, None)).__module__.startswith("mujoco") for name in ("model", "data"))


def save_mujoco(environment: MujocoEnvironment) -> bytes:
    """The state of an environment.

    Positions, velocities, activations and time are what MuJoCo integrates. Rewards and observations also read what the
    last step has computed from them (places of bodies, forces, sensors), and the environment's own attributes.
    """
    mujoco = needed("mujoco", "mujoco")
    model, data = environment.model, environment.data
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    integration = np.zeros(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, integration, kind)
    state: _State = {
        "integration": integration,
        "arrays": {name: getattr(data, name) for name in _arrays(data)},
        "model": {name: getattr(model, name) for name in _OF_MODEL},
        "attributes": {name: value for name, value in vars(environment).items() if is_plain(value)},
        "random": dict(environment.np_random.bit_generator.state),
    }
    return pack(state)


def restore_mujoco(environment: MujocoEnvironment, packed: bytes) -> None:
    """Continue from the state of an equal environment."""
    mujoco = needed("mujoco", "mujoco")
    state = cast("_State", unpack(packed))
    model, data = environment.model, environment.data
    for name, value in state["model"].items():
        getattr(model, name)[:] = value
    mujoco.mj_setState(model, data, state["integration"], mujoco.mjtState.mjSTATE_INTEGRATION)
    for name, value in state["arrays"].items():
        getattr(data, name)[:] = value
    for name, attribute in state["attributes"].items():
        present = getattr(environment, name, None)
        if isinstance(present, np.ndarray) and present.base is not None and present.flags.writeable:
            present[...] = attribute  # it may be a view of the model or of the data
        else:
            setattr(environment, name, attribute)
    environment.np_random.bit_generator.state = state["random"]


def draw(environment: object) -> NDArray[np.uint8]:
    """The image of an environment of Gymnasium.

    Gymnasium draws into the OpenGL context that was used last, even if it belongs to another environment, with the
    other one's textures; so it gets the one to use.
    """
    viewer = getattr(getattr(environment, "mujoco_renderer", None), "viewer", None)
    if viewer is not None:
        viewer.make_context_current()
    return np.array(environment.render(), np.uint8)  # type: ignore[attr-defined]


def _arrays(data: object) -> list[str]:
    found = []
    for name in dir(data):
        if name.startswith(("_", *_OF_CONTACTS)):
            continue
        value = getattr(data, name)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "biuf":
            found.append(name)
    return found
