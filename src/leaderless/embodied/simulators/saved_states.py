"""Saved states as bytes, of plain values and of whole environments of MuJoCo, which then continue bit for bit.

Bytes are JSON, with what it lacks as base64 within it. Nothing in them is executed.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Protocol, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from leaderless.environments.adapters import needed

_MARK = "\0"
"""Key of what JSON has no form for."""


def pack(value: object) -> bytes:
    """A value as bytes.

    Args:
        value: Numbers, text, bytes, arrays, and lists, tuples and dictionaries of these.

    Raises:
        TypeError: There is something else in it.
    """
    return json.dumps(_written(value)).encode()


def unpack(packed: bytes) -> object:
    """A value that was packed."""
    return _read(json.loads(packed))


def is_plain(value: object) -> bool:
    """Whether a value can be packed."""
    try:
        _written(value)
    except TypeError:
        return False
    return True


def _written(value: object) -> object:
    if value is None or isinstance(value, bool | str) or type(value) in {int, float}:
        return value
    if isinstance(value, bytes):
        return {_MARK: "bytes", "bytes": b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        kind = "array" if isinstance(value, np.ndarray) else "number"
        facts = {"dtype": array.dtype.str, "shape": list(array.shape)}
        return {_MARK: kind, **facts, "bytes": b64encode(array.tobytes()).decode()}
    if type(value) is tuple:
        return {_MARK: "tuple", "items": [_written(one) for one in value]}
    if type(value) is list:
        return [_written(one) for one in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _written(one) for key, one in value.items()}
    raise TypeError(f"a {type(value).__name__} cannot be packed: only numbers, text, bytes, arrays, and lists of them")


def _read(value: object) -> object:
    if isinstance(value, list):
        return [_read(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: _read(one) for key, one in value.items()}
    if kind == "tuple":
        return tuple(_read(one) for one in value["items"])
    content = b64decode(value["bytes"])
    if kind == "bytes":
        return content
    array = np.frombuffer(content, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array if kind == "array" else array[()]


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
