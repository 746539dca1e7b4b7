"""One thread owns the engine, whatever clients and the engine do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
from tests.unit.serving.api.engines import ScriptedEngine, ScriptedServing, raising

from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.rollout.engine import Delta, Request, SamplingParams
from leaderless.serving.api.engine_thread import EngineHost, Ticket
from leaderless.serving.http_server import ApiError


def params(max_tokens: int = 3) -> SamplingParams:
    return SamplingParams(SamplingConfig(), max_tokens)


async def all_of(ticket: Ticket) -> list[Delta]:
    return [delta async for delta in ticket.deltas()]


def with_host(engine: ScriptedEngine, test: Callable[[EngineHost], Awaitable[None]]) -> None:
    async def run() -> None:
        with EngineHost(ScriptedServing(engine)) as host:
            await asyncio.wait_for(test(host), 20)

    asyncio.run(run())


def test_requests_of_all_clients_share_the_steps_of_one_thread() -> None:
    engine = ScriptedEngine()
    engine.may_step.clear()

    async def test(host: EngineHost) -> None:
        tickets = [host.ask([Request([1], [0, 1]), Request([2], [2])], params(5)) for _ in range(4)]
        engine.may_step.set()
        for deltas in await asyncio.gather(*map(all_of, tickets)):
            for place, sibling in ((0, 0), (0, 1), (1, 0)):
                mine = [delta for delta in deltas if (delta.request, delta.sibling) == (place, sibling)]
                assert [delta.finish_reason for delta in mine] == [None] * 4 + ["length"]

    with_host(engine, test)
    assert 5 <= engine.num_steps <= 8, "only those that came while the first step was begun are behind"
    assert engine.threads == {"engine"}


def test_what_nobody_waits_for_is_given_up() -> None:
    engine = ScriptedEngine()

    async def test(host: EngineHost) -> None:
        ended, dropped = host.ask([Request([1], [0])], params()), host.ask([Request([1], [0])] * 2, params(1 << 40))
        await all_of(ended)
        host.drop(ended)
        host.drop(dropped)
        while engine.under_way or not engine.aborted:
            await asyncio.sleep(0.01)
        assert len(await all_of(host.ask([Request([1], [0])], params()))) == 3, "others go on"

    with_host(engine, test)
    assert len(engine.aborted) == 2, "what had ended needs no abort"


def test_a_prompt_that_the_engine_refuses_is_its_own_clients_error() -> None:
    engine = ScriptedEngine()
    engine.may_step.clear()
    submit = engine.submit

    def refuse(request: Request, params: SamplingParams) -> int:
        if request.prompt == [9]:
            raise ValueError("9 stands for an image")
        return submit(request, params)

    engine.submit = refuse  # type: ignore[method-assign]

    async def test(host: EngineHost) -> None:
        other, refused = (
            host.ask([Request([1], [0])], params()),
            host.ask([Request([1], [0]), Request([9], [1])], params()),
        )
        with pytest.raises(ApiError, match="the engine refuses the request: 9 stands for an image") as caught:
            await all_of(refused)
        assert caught.value.status == 400
        engine.may_step.set()
        assert len(await all_of(other)) == 3

    with_host(engine, test)
    assert len(engine.aborted) == 1, "its first prompt"


def test_when_memory_runs_out_clients_are_told_and_the_next_are_answered() -> None:
    engine = ScriptedEngine()

    def run_out() -> None:
        engine.before_step = lambda: None
        raise MemoryError

    engine.before_step = run_out

    async def test(host: EngineHost) -> None:
        with pytest.raises(ApiError, match="out of memory") as caught:
            await all_of(host.ask([Request([1], [0])], params()))
        assert caught.value.status == 503
        assert len(await all_of(host.ask([Request([1], [0])], params()))) == 3

    with_host(engine, test)


def test_an_engine_has_begun_when_it_can_be_asked() -> None:
    engine, may_start = ScriptedEngine(), threading.Event()
    engine.start = lambda: may_start.wait(10)

    async def test(host: EngineHost) -> None:
        begun = asyncio.create_task(host.begun())
        await asyncio.sleep(0.1)
        assert not begun.done()
        may_start.set()
        assert await begun

    with_host(engine, test)


def test_an_engine_that_does_not_start_is_not_waited_for() -> None:
    engine = ScriptedEngine()
    engine.start = raising(RuntimeError("no such device"))

    async def test(host: EngineHost) -> None:
        assert not await host.begun()

    with pytest.raises(RuntimeError, match="no such device"):
        with_host(engine, test)


def test_memory_in_the_log_of_another_process_does_not_keep_a_dead_engine_in_use() -> None:
    engine = ScriptedEngine()
    engine.before_step = raising(EngineError("the server has ended; the end of its log: CUDA out of memory"))

    async def test(host: EngineHost) -> None:
        with pytest.raises(ApiError, match="the engine has failed"):
            await all_of(host.ask([Request([1], [0])], params()))

    with pytest.raises(EngineError):
        with_host(engine, test)


def test_an_engine_that_fails_ends_the_host_and_leaves_nobody_waiting() -> None:
    engine = ScriptedEngine()
    engine.may_step.clear()
    engine.before_step = raising(RuntimeError("the device is gone"))

    async def test(host: EngineHost) -> None:
        during = host.ask([Request([1], [0])], params())
        assert await asyncio.to_thread(engine.in_step.wait, 10)
        behind = host.ask([Request([1], [0])], params())
        engine.may_step.set()
        for ticket in (during, behind):
            with pytest.raises(ApiError, match="the device is gone"):
                await all_of(ticket)
        with pytest.raises(ApiError, match="the server is stopping"):
            host.ask([Request([1], [0])], params())

    with pytest.raises(RuntimeError, match="the device is gone"):
        with_host(engine, test)


def test_a_host_that_stops_says_so_to_who_waits() -> None:
    async def test(host: EngineHost) -> None:
        ticket = host.ask([Request([1], [0])], params(1 << 40))
        host.stop()
        with pytest.raises(ApiError, match="the server is stopping"):
            await all_of(ticket)
        assert host.is_stopping

    with_host(ScriptedEngine(), test)
