"""Puts the HTTP application together: routes, errors, the guard in front."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from rabbet import __version__
from rabbet.errors import RabbetError, shorten
from rabbet.server import routes
from rabbet.server.body import schema_of
from rabbet.server.chat import create_chat_completion
from rabbet.server.completions import create_completion
from rabbet.server.docs import docs_page
from rabbet.server.errors import error_response, from_exception
from rabbet.server.middleware import BODY_LIMIT_S, Guard
from rabbet.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from rabbet.server.state import ServerState

__all__ = ["build_app"]

_STATUS_TEXTS = {404: "there is no such route", 405: "this route does not take that method"}


def build_app(state: ServerState, *, body_limit_s: float = BODY_LIMIT_S) -> FastAPI:
    """The application for one server.

    Args:
        state: What its routes share; its ``llm`` may come later.
        body_limit_s: Seconds that a request's body may take to arrive.
    """
    config = state.config
    has_docs = not config.disable_fastapi_docs
    app = FastAPI(
        title="Rabbet",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if has_docs else None,
        redirect_slashes=False,
    )
    _add_probes(app, state)
    _add_api(app, state)
    if has_docs:
        _add_docs(app, config.root_path.rstrip("/"))
    _add_error_handlers(app)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
    app.add_middleware(Guard, config=config, on_response=state.stats.observe_response, body_limit_s=body_limit_s)
    return app


def _add_probes(app: FastAPI, state: ServerState) -> None:
    def get(path: str, answer: Callable[[ServerState], Response], *more: str) -> None:
        async def route() -> Response:
            return answer(state)

        route.__doc__ = answer.__doc__
        app.add_api_route(path, route, methods=["GET"], name=path.strip("/"))
        app.add_api_route(path, route, methods=["HEAD", *more], name=path.strip("/"), include_in_schema=False)

    get("/health", routes.health)
    get("/ready", routes.health)
    get("/ping", routes.health, "POST")
    get("/version", routes.version)
    get("/metrics", routes.metrics)
    get("/v1/models", routes.list_models)


def _add_api(app: FastAPI, state: ServerState) -> None:
    def post(path: str, handler: Callable[[Request, ServerState], Awaitable[Response]], model: Any) -> None:
        async def route(request: Request) -> Response:
            try:
                return await handler(request, state)
            except (asyncio.CancelledError, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001  the edge to the client: described, logged, answered
                return from_exception(error)

        route.__doc__ = handler.__doc__
        app.add_api_route(path, route, methods=["POST"], openapi_extra=schema_of(model), name=path.strip("/"))

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        """One model."""
        return routes.show_model(state, name)

    post("/v1/completions", create_completion, CompletionRequest)
    post("/v1/chat/completions", create_chat_completion, ChatCompletionRequest)
    post("/tokenize", routes.tokenize, TokenizeRequest)
    post("/detokenize", routes.detokenize, DetokenizeRequest)


def _add_docs(app: FastAPI, root_path: str) -> None:
    async def docs() -> Response:
        # Made anew each time: plugins add routes when the engine is ready.
        return docs_page(app.openapi(), root_path)

    app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_error(_request: Request, error: Exception) -> Response:
        return from_exception(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status, text = error.status_code, str(error.detail)
        # A plugin's route may say more than the status does; what only names the status gets a sentence.
        if text == HTTPStatus(status).phrase:
            text = f"{_STATUS_TEXTS.get(status, text)}: {request.method} {shorten(request.url.path)}"
        return error_response(text, status=status, headers=dict(error.headers or {}))

    async def on_validation(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        place = [str(item) for item in (error.errors() or [{}])[0].get("loc", ())]
        return error_response("the request is malformed", status=400, param=place[-1] if place else None)

    app.add_exception_handler(RabbetError, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_error)
