"""Makes the engines of roles with the back end that a recipe names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from leaderless.base.named_functions import load_own
from leaderless.config import RecipeError
from leaderless.planner.engines import BACKEND_KEY, backend_of
from leaderless.training.engine import EngineSetup, TrainEngine, ValueEngine


def make_train_engine(backend: str, setup: EngineSetup) -> TrainEngine:
    """Make the engine of a language model. All ranks of its layout call it together.

    Raises:
        RecipeError: There is no such back end, what it makes is no `TrainEngine`, or the model cannot be loaded.
    """
    assert not setup.is_critic
    return cast(TrainEngine, _make(backend, setup, TrainEngine))


def make_value_engine(backend: str, setup: EngineSetup) -> ValueEngine:
    """Make the engine of a value model. All ranks of its layout call it together.

    Raises:
        RecipeError: There is no such back end, what it makes is no `ValueEngine`, or the model cannot be loaded.
    """
    assert setup.is_critic
    return cast(ValueEngine, _make(backend, setup, ValueEngine))


def _make(backend: str, setup: EngineSetup, protocol: type[Protocol]) -> object:  # type: ignore[valid-type]
    spec = backend_of(backend)
    name = spec.for_bodies if setup.body is not None and spec.for_bodies else spec.implementation
    engine = cast("Callable[[EngineSetup], object]", load_own(name))(setup)
    names = {name for base in protocol.__mro__ for name in (*vars(base), *getattr(base, "__annotations__", ()))}
    missing = sorted(name for name in names if not name.startswith("_") and not hasattr(engine, name))
    if missing:
        raise RecipeError.at(
            BACKEND_KEY,
            f"'{backend}' made {type(engine).__name__} for role '{setup.role}', which is no {protocol.__name__}: "
            f"it lacks {', '.join(missing)}",
        )
    return engine
