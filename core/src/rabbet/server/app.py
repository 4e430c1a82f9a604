"""Puts the HTTP application together: routes, errors, the guard in front, hooks of plugins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from rabbet import __version__
from rabbet.errors import RabbetError
from rabbet.server import routes
from rabbet.server.body import schema_of
from rabbet.server.chat import create_chat_completion
from rabbet.server.completions import create_completion
from rabbet.server.errors import error_response, from_exception
from rabbet.server.middleware import Guard
from rabbet.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from rabbet.server.state import ServerState

__all__ = ["build_app"]

_STATUS_TEXTS = {404: "there is no such route", 405: "this route does not take that method"}


def build_app(state: ServerState) -> FastAPI:
    """The application for one server."""
    has_docs = not state.config.disable_fastapi_docs
    app = FastAPI(
        title="Rabbet",
        version=__version__,
        docs_url="/docs" if has_docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if has_docs else None,
        root_path=state.config.root_path,
        redirect_slashes=False,
    )
    _add_probes(app, state)
    _add_api(app, state)
    _add_error_handlers(app)
    if state.hooks is not None:
        state.hooks.call("add_http_routes", app=app, llm=state.llm)
    if state.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.config.allowed_origins,
            allow_methods=state.config.allowed_methods,
            allow_headers=state.config.allowed_headers,
            allow_credentials=state.config.allow_credentials,
        )
    app.add_middleware(
        Guard,
        api_keys=state.config.api_key,
        max_body_bytes=state.config.max_body_bytes,
        root_path=state.config.root_path,
        echo_request_id=state.config.enable_request_id_headers,
    )
    return app


def _add_probes(app: FastAPI, state: ServerState) -> None:
    def get(path: str, answer: Callable[[ServerState], Response], methods: tuple[str, ...] = ("GET", "HEAD")) -> None:
        async def route() -> Response:
            return answer(state)

        route.__doc__ = answer.__doc__
        app.add_api_route(path, route, methods=list(methods), include_in_schema="GET" in methods, name=path.strip("/"))

    get("/health", routes.health)
    get("/ready", routes.health)
    get("/ping", routes.health, ("GET", "HEAD", "POST"))
    get("/version", routes.version)
    get("/metrics", routes.metrics)
    get("/v1/models", routes.list_models)


def _add_api(app: FastAPI, state: ServerState) -> None:
    def post(path: str, handler: Callable[[Request, ServerState], Awaitable[Response]], model: Any) -> None:
        async def route(request: Request) -> Response:
            return await _answered(handler(request, state))

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


async def _answered(work: Awaitable[Response]) -> Response:
    """The response, or the error's; a group of errors from several prompts gives the first."""
    try:
        return await work
    except ExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        assert isinstance(first, Exception)
        return from_exception(first)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_rabbet(_request: Request, error: Exception) -> Response:
        return from_exception(error)

    async def on_http(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = _STATUS_TEXTS.get(error.status_code, str(error.detail))
        headers = dict(error.headers or {})
        return error_response(text, status=error.status_code, headers=headers)

    async def on_validation(_request: Request, _error: Exception) -> Response:
        return error_response("the request is malformed", status=400)

    app.add_exception_handler(RabbetError, on_rabbet)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_rabbet)
