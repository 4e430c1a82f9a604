"""The asynchronous front end, on an engine that computes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rabbet import AsyncLLM, SamplingParams
from rabbet.config.load import engine_config_from_kwargs
from rabbet.errors import ContextLengthError, EngineDeadError, InvalidRequestError, OverloadedError
from rabbet.types.sampling import OutputKind

LONG = 100_000
Work = Callable[[AsyncLLM], Coroutine[Any, Any, None]]


@pytest.fixture
def run(null: ModuleType, model_dir: Path, options: dict[str, Any]) -> Callable[..., None]:
    """Runs a coroutine function with an engine in a thread, and checks that nothing was left in it."""

    @asynccontextmanager
    async def engine(**changes: Any) -> AsyncIterator[AsyncLLM]:
        config = engine_config_from_kwargs(str(model_dir), **(options | {"max_model_len": LONG} | changes))
        llm = await AsyncLLM.from_config(config, engine_process=changes.get("engine_process", False), log_level="error")
        try:
            yield llm
        finally:
            await llm.shutdown()

    def runner(work: Work, *, is_dead: bool = False, **changes: Any) -> None:
        async def main() -> None:
            async with engine(**changes) as llm:
                await work(llm)
                if not is_dead:
                    await _is_empty(llm)

        asyncio.run(main())

    return runner


async def _is_empty(llm: AsyncLLM) -> None:
    """No request is left at the front or, once aborts have arrived, in the engine."""
    assert llm.num_open_requests == 0
    await llm.check_integrity()
    stats = await asyncio.wrap_future(llm.client.call("stats"))
    assert stats.num_running == stats.num_waiting == 0
    assert await llm.reset_prefix_cache()


async def collect(llm: AsyncLLM, prompt: Any, **sampling: Any) -> list[Any]:
    return [output async for output in llm.generate(prompt, SamplingParams(**sampling))]


def test_deltas_join_to_the_whole(run: Callable[..., None], null: ModuleType) -> None:
    async def work(llm: AsyncLLM) -> None:
        outputs = await collect(llm, [1, 2], max_tokens=50, output_kind=OutputKind.DELTA)
        ids = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
        assert ids == null.tokens_of([1, 2], 50)
        assert "".join(output.outputs[0].text for output in outputs) == bytes(ids).decode()
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]

    run(work)


def test_many_requests_at_once(run: Callable[..., None], null: ModuleType) -> None:
    async def work(llm: AsyncLLM) -> None:
        results = await asyncio.gather(*(collect(llm, [i + 1], max_tokens=9) for i in range(40)))
        assert [r[-1].outputs[0].token_ids for r in results] == [null.tokens_of([i + 1], 9) for i in range(40)]

    run(work)


def test_a_reader_that_leaves_aborts_in_the_engine(run: Callable[..., None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        stream = llm.generate([1], SamplingParams(max_tokens=LONG - 9))
        await anext(stream)
        await stream.aclose()

    run(work)


def test_a_cancelled_reader_aborts_in_the_engine(run: Callable[..., None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate([1], SamplingParams(max_tokens=LONG - 9, n=3)):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work)


def test_abort_by_name_ends_the_stream_with_what_there_is(run: Callable[..., None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        outputs = []
        async for output in llm.generate([1], SamplingParams(max_tokens=LONG - 9), request_id="mine"):
            outputs.append(output)
            await llm.abort("mine")
            await llm.abort("nobody's")
        last = outputs[-1]
        assert last.request_id == "mine"
        assert last.finished and last.outputs[0].finish_reason == "abort"

    run(work)


def test_two_live_requests_may_have_one_name(run: Callable[..., None], null: ModuleType) -> None:
    async def work(llm: AsyncLLM) -> None:
        async def one(prompt: list[int]) -> list[int]:
            outputs = [o async for o in llm.generate(prompt, SamplingParams(max_tokens=5), request_id="same")]
            return list(outputs[-1].outputs[0].token_ids)

        assert await asyncio.gather(one([1]), one([2])) == [null.tokens_of([1], 5), null.tokens_of([2], 5)]

    run(work)


def test_wrong_requests_are_refused_before_they_are_sent(run: Callable[..., None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequestError):
            await collect(llm, [])
        with pytest.raises(ContextLengthError):
            await collect(llm, [1], max_tokens=LONG)
        with pytest.raises(InvalidRequestError, match="cache_salt"):
            await anext(llm.generate([1], cache_salt=""))
        (output,) = [
            o async for o in llm.generate([1] * (LONG - 2), SamplingParams(max_tokens=9), clamp_max_tokens=True)
        ][-1:]
        assert len(output.outputs[0].token_ids) == 2

    run(work)


def test_salts_do_not_share_blocks(run: Callable[..., None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        async def cached(salt: str | None) -> int:
            outputs = [o async for o in llm.generate([1] * 40, SamplingParams(max_tokens=1), cache_salt=salt)]
            return int(outputs[-1].num_cached_tokens)

        assert [await cached(salt) for salt in (None, "a", "b", "a", None)] == [0, 0, 0, 36, 36]

    run(work)


def test_a_refusal_of_the_engine_keeps_its_kind(run: Callable[..., None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        results = await asyncio.gather(
            *(collect(llm, [1], max_tokens=50, n=2) for _ in range(40)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, BaseException)]
        assert refused and all(isinstance(error, OverloadedError) for error in refused)
        assert all(r[-1].finished for r in results if not isinstance(r, BaseException))

    run(work, max_num_queued_reqs=2, max_num_seqs=1)


def test_a_failed_request_ends_with_its_error(run: Callable[..., None], null: ModuleType) -> None:
    async def work(llm: AsyncLLM) -> None:
        bad, good = await asyncio.gather(collect(llm, [null.FAIL_ROW], max_tokens=5), collect(llm, [1], max_tokens=5))
        assert bad[-1].finished and bad[-1].outputs[0].finish_reason == "error"
        assert good[-1].outputs[0].finish_reason == "length"

    run(work)


def test_several_outputs_end_once_each(run: Callable[..., None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        outputs = await collect(llm, [1], n=3, max_tokens=8, output_kind=OutputKind.DELTA)
        ends = [item.index for output in outputs for item in output.outputs if item.finish_reason]
        assert sorted(ends) == [0, 1, 2]

    run(work)


@pytest.mark.parametrize("engine_process", [True, False])
def test_the_death_of_the_engine_ends_every_stream(
    engine_process: bool, null: ModuleType, model_dir: Path, options: dict[str, Any]
) -> None:
    async def main() -> None:
        config = engine_config_from_kwargs(str(model_dir), **(options | {"max_model_len": LONG}))
        llm = await AsyncLLM.from_config(config, engine_process=engine_process, log_level="error")
        told: list[EngineDeadError] = []
        llm.on_engine_death = told.append
        streams = [asyncio.create_task(collect(llm, [i + 1], max_tokens=LONG - 9)) for i in range(4)]
        poison = null.EXIT_PROCESS if engine_process else null.DEAD_EXECUTOR
        streams.append(asyncio.create_task(collect(llm, [poison])))
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert len(told) == 1
        with pytest.raises(EngineDeadError):
            llm.check_health()
        with pytest.raises(EngineDeadError):
            await collect(llm, [1])
        assert llm.num_open_requests == 0
        await llm.shutdown()

    asyncio.run(main())


def test_a_shutdown_ends_every_stream(model_dir: Path, options: dict[str, Any]) -> None:
    async def main() -> None:
        config = engine_config_from_kwargs(str(model_dir), **(options | {"max_model_len": LONG}))
        llm = await AsyncLLM.from_config(config, engine_process=False)
        started = asyncio.Event()

        async def read() -> str | None:
            reason = None
            async for output in llm.generate([1], SamplingParams(max_tokens=LONG - 9)):
                reason = output.outputs[0].finish_reason
                started.set()
            return reason

        task = asyncio.create_task(read())
        await started.wait()
        await llm.shutdown()
        assert await task == "abort"

    asyncio.run(main())


def test_a_cancelled_start_leaves_no_process(model_dir: Path, options: dict[str, Any]) -> None:
    async def main() -> None:
        config = engine_config_from_kwargs(str(model_dir), **options)
        reached = asyncio.Event()
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(
            AsyncLLM.from_config(config, on_phase=lambda _: loop.call_soon_threadsafe(reached.set), log_level="error")
        )
        await reached.wait()
        task.cancel()
        with pytest.raises((asyncio.CancelledError, EngineDeadError)):
            await task
        children = Path("/proc/self/task").glob("*/children")
        engines = [pid for path in children for pid in path.read_text().split() if "rabbet.engine" in _command(pid)]
        assert engines == []

    asyncio.run(main())


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
