"""Runs the server: socket first, then the engine, then requests; drains and ends with a status that says how it went.

Exit status: 0 after a signal, 1 if something outside the configuration failed, 2 for a wrong configuration, 3 if the
engine died.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn

from rabbet.config.resolve import policy_of
from rabbet.config.schema import EngineConfig, ServerConfig
from rabbet.errors import ConfigError, EngineDeadError, PluginError, RabbetError
from rabbet.front.async_llm import AsyncLLM
from rabbet.metrics.stats import ThroughputWindow
from rabbet.registry import Catalog, HookBus
from rabbet.server.app import build_app
from rabbet.server.state import ServerState

__all__ = ["EXIT_CONFIG", "EXIT_ENGINE_DEAD", "EXIT_FAILED", "serve"]

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_ENGINE_DEAD = 3
_DRAIN_POLL_S = 0.05
_MAX_HEADER_BYTES = 64 << 10
logger = logging.getLogger(__name__)


def serve(engine: EngineConfig, server: ServerConfig) -> int:
    """Run until a signal or the engine's death; returns the exit status."""
    try:
        _prepare(server)
        listener = _bind(server)
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_CONFIG
    except OSError as error:
        where = server.uds or f"{server.host or '0.0.0.0'}:{server.port}"
        logger.error("cannot listen on %s: %s; choose another --port", where, error.strerror)
        return EXIT_FAILED
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(engine, server, listener))
    except RabbetError as error:
        logger.error("%s", error)
        return EXIT_CONFIG
    finally:
        listener.close()
        if server.uds:
            Path(server.uds).unlink(missing_ok=True)


async def _serve(engine: EngineConfig, server: ServerConfig, listener: socket.socket) -> int:
    """Made inside the loop, which the server's event belongs to."""
    return await _Server(engine, server, listener).run()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _prepare(server: ServerConfig) -> None:
    """Read a chat template file, so that a wrong path is an error of the start."""
    template = server.chat_template
    if template is not None and "{" not in template:
        try:
            server.chat_template = Path(template).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--chat-template {template} cannot be read: {error.strerror}", field="chat_template"
            ) from error


def _bind(server: ServerConfig) -> socket.socket:
    if server.uds:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(server.uds).unlink(missing_ok=True)
        listener.bind(server.uds)
        Path(server.uds).chmod(0o600)
    else:
        host = server.host or "0.0.0.0"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, server.port))
    listener.listen(2048)
    return listener


class _Server:
    """One run."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, listener: socket.socket) -> None:
        self._engine_config = engine
        self._config = server
        self._listener = listener
        policy = policy_of(engine)
        self._hooks = HookBus.load(Catalog.scan(policy), policy)
        self._state = ServerState(server, hooks=self._hooks)
        self._stop = asyncio.Event()
        self._signals = 0
        self._death: EngineDeadError | None = None

    async def run(self) -> int:
        """Serve probes at once, requests when the engine is ready, nothing after a signal."""
        http = self._http_server()
        self._install_signals()
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        stopping = asyncio.create_task(self._stop.wait())
        starting = asyncio.create_task(self._start_engine())
        status = 0
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                reporter = asyncio.create_task(self._report())
                await stopping
                reporter.cancel()
            else:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
        except RabbetError as error:
            logger.error("%s", error)
            logger.debug("the engine did not start", exc_info=error)
            status = EXIT_CONFIG if isinstance(error, ConfigError | PluginError) else EXIT_FAILED
        finally:
            await self._drain()
            http.should_exit = True
            http.force_exit = self._signals > 1
            await serving
            stopping.cancel()
            if self._state.llm is not None:
                await self._state.llm.shutdown()
            self._hooks.call("on_shutdown")
        if self._death is not None:
            logger.error("the engine died: %s", self._death)
            return EXIT_ENGINE_DEAD
        return status

    def _http_server(self) -> uvicorn.Server:
        config = uvicorn.Config(
            build_app(self._state),
            log_config=None,
            access_log=not self._config.disable_access_log and self._config.log_level == "debug",
            lifespan="off",
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            http="h11",
            ssl_keyfile=self._config.ssl_keyfile,
            ssl_certfile=self._config.ssl_certfile,
            server_header=False,
            timeout_keep_alive=30,
        )
        server = uvicorn.Server(config)
        # Signals are ours: uvicorn would stop before the running requests have ended.
        server.capture_signals = _no_signals  # type: ignore[method-assign]
        return server

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self._signals += 1
        self._state.is_draining = True
        self._stop.set()
        if self._signals == 1:
            logger.info("stopping: no new requests; %d run (a second signal ends them at once)", self._state.running)

    async def _start_engine(self) -> None:
        started = time.monotonic()
        llm = await AsyncLLM.from_config(
            self._engine_config,
            is_server=True,
            on_phase=lambda name: logger.info("%s (%.1f s)", name, time.monotonic() - started),
            log_level=self._config.log_level,
        )
        if self._config.chat_template is not None:
            llm.chat_template = self._config.chat_template
        llm.on_engine_death = self._on_death
        self._state.llm = llm
        self._hooks.call("on_engine_ready", config=self._engine_config)
        info = llm.model_info
        logger.info(
            "ready at %s after %.1f s: model %s, %s, context %d tokens, %.1f requests of that length at once, docs at "
            "%s/docs, composition %s",
            self._url(),
            time.monotonic() - started,
            ", ".join(info.names),
            info.dtype,
            info.max_model_len,
            info.max_concurrency,
            self._url(),
            info.digest[:12],
        )

    def _url(self) -> str:
        if self._config.uds:
            return f"unix:{self._config.uds}"
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._config.ssl_certfile else "http"
        return f"{scheme}://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}{self._config.root_path}"

    def _on_death(self, error: EngineDeadError) -> None:
        self._death = error
        self._state.is_draining = True
        self._stop.set()

    async def _drain(self) -> None:
        """Wait for running requests, at most ``--shutdown-timeout`` seconds; a second signal ends the wait."""
        self._state.is_draining = True
        if self._death is not None:
            # Let the errors reach the clients.
            deadline = time.monotonic() + 1.0
        else:
            deadline = time.monotonic() + self._engine_config.shutdown_timeout
        while self._state.running and time.monotonic() < deadline and self._signals < 2:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self._state.llm is not None and self._state.running and self._death is None:
            self._state.llm.on_death(EngineDeadError("the server is shutting down"))
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _report(self) -> None:
        """The periodic line, while there is something to say."""
        observability = self._engine_config.observability
        window, is_quiet = ThroughputWindow(), False
        while not observability.disable_log_stats:
            await asyncio.sleep(observability.log_stats_interval_s)
            stats = self._state.llm.stats() if self._state.llm is not None else None
            if stats is None:
                continue
            line = window.line(stats)
            is_idle = stats.num_running == 0 and stats.num_waiting == 0
            if not (is_idle and is_quiet):
                logger.info("%s", line)
            is_quiet = is_idle


def _no_signals() -> object:
    from contextlib import nullcontext

    return nullcontext()
