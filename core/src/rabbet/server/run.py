"""Runs the server: socket first, then the engine, then requests; drains and ends with a status that says how it went.

Exit status: 0 after a signal, 1 if something outside the configuration failed, 2 for a wrong configuration, 3 if the
engine died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from socket import socket

import uvicorn

from rabbet._util.files import read_text
from rabbet.config.policy import policy_of
from rabbet.config.schema import EngineConfig, ServerConfig
from rabbet.errors import ConfigError, EngineDeadError, InvalidRequestError, PluginError, RabbetError
from rabbet.front.async_llm import AsyncLLM
from rabbet.front.chat import check_template
from rabbet.metrics.log import ThroughputLine
from rabbet.registry import Catalog, HookBus
from rabbet.server.app import build_app
from rabbet.server.choices import parsers_of, stat_loggers_of
from rabbet.server.connection import Connection
from rabbet.server.errors import ShuttingDownError
from rabbet.server.listen import address_of, bind, check_tls, reach_of, release, url_of
from rabbet.server.middleware import MAX_HEAD_BYTES
from rabbet.server.state import ServerState

__all__ = ["EXIT_CONFIG", "EXIT_ENGINE_DEAD", "EXIT_FAILED", "serve"]

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_ENGINE_DEAD = 3
_DRAIN_POLL_S = 0.05
_CLOSE_LIMIT_S = 5.0
_STATS_INTERVAL_S = 1.0
logger = logging.getLogger(__name__)


def serve(engine: EngineConfig, server: ServerConfig) -> int:
    """Run until a signal or the engine's death; returns the exit status."""
    try:
        _read_template(server)
        check_tls(server)
        listener = bind(server)
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_CONFIG
    except OSError as error:
        option = "--uds" if server.uds else "--port"
        logger.error("cannot listen on %s: %s; choose another %s", address_of(server)[:200], error.strerror or error, option)
        return EXIT_FAILED
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(engine, server, listener))
    except RabbetError as error:
        logger.error("%s", error)
        return EXIT_CONFIG
    finally:
        release(server, listener)


async def _serve(engine: EngineConfig, server: ServerConfig, listener: socket) -> int:
    """Made inside the loop, which the server's event belongs to."""
    return await _Server(engine, server, listener).run()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _read_template(server: ServerConfig) -> None:
    """Read and compile a chat template, so that a wrong one is an error of the start."""
    template = server.chat_template
    if template is None:
        return
    source = "--chat-template"
    if "{" not in template:
        source = f"--chat-template {template}"
        try:
            server.chat_template = read_text(template, limit=1 << 20)
        except OSError as error:
            raise ConfigError(f"{source} cannot be read: {error.strerror}", field="chat_template") from error
    try:
        check_template(server.chat_template or "")
    except InvalidRequestError as error:
        raise ConfigError(f"{source}: {error}", field="chat_template") from error


class _Server:
    """One run."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, listener: socket) -> None:
        self._engine_config = engine
        self._config = server
        self._url = url_of(server, listener)
        self._listener = listener
        policy = policy_of(engine)
        for file in policy.files:
            logger.info("importing %s", file)
        catalog = Catalog.scan(policy)
        self._hooks = HookBus.load(catalog, policy)
        self._state = ServerState(
            server,
            hooks=self._hooks,
            parsers=parsers_of(server, catalog),
            stat_loggers=stat_loggers_of(engine, catalog),
        )
        self._hooks.total_failures = self._state.stats.plugin_failures
        self._app = build_app(self._state)
        self._http = self._http_server()
        self._stop = asyncio.Event()
        self._signals = 0
        self._death: EngineDeadError | None = None

    async def run(self) -> int:
        """Serve probes at once, requests when the engine is ready, nothing after a signal."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        # It should outlast all else; if it does not, there is nobody to serve.
        serving.add_done_callback(lambda _task: self._stop.set())
        status = 0
        try:
            await self._until_stopped()
        except RabbetError as error:
            logger.debug("the engine did not start", exc_info=error)
            logger.error("%s", error)
            status = EXIT_CONFIG if isinstance(error, ConfigError | PluginError) else EXIT_FAILED
        finally:
            await self._drain()
            self._http.should_exit = True
            (failure,) = await asyncio.gather(serving, return_exceptions=True)
            if failure is not None:
                logger.error("the server takes no connections: %s: %s", type(failure).__name__, failure)
                status = EXIT_FAILED
            if self._state.llm is not None:
                await self._state.llm.shutdown()
            self._hooks.call("on_shutdown")
            self._state.tell(lambda listener: listener.close())
        if self._death is not None:
            logger.error("the engine died: %s", self._death)
            return EXIT_ENGINE_DEAD
        return status

    async def _until_stopped(self) -> None:
        """Start the engine and wait for a signal or its death; a signal also ends the start."""
        stopping = asyncio.create_task(self._stop.wait())
        starting = asyncio.create_task(self._start_engine())
        background: list[asyncio.Task[None]] = []
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                background = [asyncio.create_task(self._report()), asyncio.create_task(self._feed_stat_loggers())]
                await stopping
        finally:
            tasks = (starting, stopping, *background)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _http_server(self) -> uvicorn.Server:
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=not self._config.disable_access_log and self._config.log_level == "debug",
            lifespan="off",
            http=Connection,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ssl_keyfile=self._config.ssl_keyfile,
            ssl_certfile=self._config.ssl_certfile,
            server_header=False,
            timeout_keep_alive=30,
            # A client that does not read its answer must not keep us from ending.
            timeout_graceful_shutdown=int(_CLOSE_LIMIT_S),
        )
        server = uvicorn.Server(config)
        # Signals are ours: uvicorn would stop before the running requests have ended.
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        return server

    def _on_signal(self) -> None:
        self._signals += 1
        self._state.is_draining = True
        self._stop.set()
        if self._signals == 1:
            logger.info("stopping: no new requests; %d run (a second signal ends them at once)", self._state.running)
        else:
            self._http.force_exit = True

    async def _start_engine(self) -> None:
        started = time.monotonic()

        def tell(phase: str) -> None:
            # That the engine is ready is told once, when the server is too.
            if phase != "ready":
                logger.info("%s (%.1f s)", phase, time.monotonic() - started)

        llm = await AsyncLLM.from_config(
            self._engine_config,
            is_server=True,
            on_phase=tell,
            log_level=self._config.log_level,
        )
        if self._config.chat_template is not None:
            llm.chat_template = self._config.chat_template
        llm.on_engine_death = self._on_death
        self._state.llm = llm
        self._hooks.call("add_http_routes", app=self._app, llm=llm)
        # Whoever asked while the engine was loading has made the description without the plugins' routes.
        self._app.openapi_schema = None
        self._hooks.call("on_engine_ready", config=self._engine_config)
        llm.settle()
        info = llm.model_info
        logger.info(
            "ready at %s%s after %.1f s: model %s, %s, context %d tokens, %.1f requests of that length at once, docs at "
            "%s, composition %s",
            self._url,
            reach_of(self._config),
            time.monotonic() - started,
            ", ".join(info.names),
            info.dtype,
            info.max_model_len,
            info.max_concurrency,
            "no address" if self._config.disable_fastapi_docs else f"{self._url}/docs",
            info.digest[:12] + (f", Rabbet itself changed by {'; '.join(info.tampered)}" if info.tampered else ""),
        )

    def _on_death(self, error: EngineDeadError) -> None:
        self._death = error
        self._state.is_dead = True
        self._stop.set()

    async def _drain(self) -> None:
        """Wait for running requests, at most ``--shutdown-timeout`` seconds; a second signal ends the wait."""
        self._state.is_draining = True
        limit_s = self._engine_config.shutdown_timeout if self._death is None else 0.0
        await self._wait_for_requests(limit_s)
        if self._state.llm is not None and self._state.running and self._death is None:
            self._state.llm.on_death(ShuttingDownError("the server is shutting down"))
        # The errors have to reach the clients.
        await self._wait_for_requests(1.0)

    async def _wait_for_requests(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._state.running and time.monotonic() < deadline and self._signals < 2:
            await asyncio.sleep(min(_DRAIN_POLL_S, limit_s))

    async def _report(self) -> None:
        """The periodic line, while there is something to say."""
        observability = self._engine_config.observability
        throughput = ThroughputLine(time.monotonic())
        while not observability.disable_log_stats:
            await asyncio.sleep(observability.log_stats_interval_s)
            stats = self._state.llm.stats() if self._state.llm is not None else None
            line = throughput.line(stats, time.monotonic()) if stats is not None else None
            if line is not None:
                logger.info("%s", line)

    async def _feed_stat_loggers(self) -> None:
        while self._state.stat_loggers:
            await asyncio.sleep(_STATS_INTERVAL_S)
            stats = self._state.llm.stats() if self._state.llm is not None else None
            if stats is not None:
                self._state.tell(lambda listener, stats=stats: listener.on_stats(stats))  # type: ignore[misc]
