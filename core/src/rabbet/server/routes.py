"""The small routes: probes, version, models, metrics, tokenising."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rabbet import __version__
from rabbet.errors import InvalidRequestError, RabbetError
from rabbet.metrics.prometheus import Served, render_metrics
from rabbet.server.body import body_size, read_body
from rabbet.server.chat import chat_prompt
from rabbet.server.early import check_chat
from rabbet.server.errors import error_response, json_response, model_not_found
from rabbet.server.protocol import DetokenizeRequest, TokenizeRequest
from rabbet.server.state import ServerState

__all__ = ["detokenize", "health", "list_models", "metrics", "show_model", "tokenize", "version"]

_MAX_TOKENS = 1 << 20


def health(state: ServerState) -> Response:
    """200 while the engine's loop is alive and requests are taken; 503 while starting, draining or dead."""
    if state.is_dead:
        return error_response("the engine is not available", status=503, code="engine_dead")
    if state.is_draining:
        return error_response("the server is shutting down", status=503, code="draining")
    if state.llm is None:
        return error_response("the server is starting", status=503, code="starting", headers={"Retry-After": "2"})
    try:
        state.llm.check_health()
    except RabbetError as error:
        return error_response(str(error), status=503, code="engine_dead")
    return json_response({"status": "ok"})


def version(state: ServerState) -> Response:
    """Rabbet's version and the composition's digest."""
    info = state.llm.model_info if state.llm is not None else None
    answer: dict[str, Any] = {"version": __version__, "composition": info.digest if info is not None else None}
    if info is not None and info.tampered:
        answer["tampered"] = info.tampered
    return json_response(answer)


def list_models(state: ServerState) -> Response:
    """Every name that a request may use."""
    names = state.engine().model_info.names
    return json_response({"object": "list", "data": [_model(state, name) for name in names]})


def show_model(state: ServerState, name: str) -> Response:
    """One model."""
    names = state.engine().model_info.names
    if name not in names:
        raise model_not_found(name, names)
    return json_response(_model(state, name))


def _model(state: ServerState, name: str) -> dict[str, Any]:
    info = state.engine().model_info
    return {
        "id": name,
        "object": "model",
        "created": state.started_s,
        "owned_by": "rabbet",
        "root": info.names[0],
        "parent": None,
        "max_model_len": info.max_model_len,
        "permission": [],
    }


def metrics(state: ServerState) -> Response:
    """Counters, gauges and histograms as Prometheus reads them."""
    llm = state.llm
    served = Served()
    if llm is not None:
        info = llm.model_info
        served = Served(model=info.names[0], digest=info.digest, block_size=info.block_size, num_blocks=info.num_blocks)
    text = render_metrics(
        state.stats, llm.stats() if llm is not None else None, served, compat=state.config.metrics_compat
    )
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def tokenize(request: Request, state: ServerState) -> Response:
    """The ids that the engine would see of a prompt or of messages."""
    body = await read_body(request, TokenizeRequest, state, early=check_chat)
    llm = state.engine()
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", field="prompt")
    if llm.tokenizer is None:
        raise InvalidRequestError("the tokenizer is off", field="prompt")
    if body.messages is not None:
        ids = (await asyncio.to_thread(chat_prompt, body, state, llm)).token_ids
    else:
        # Not by the processor: counting the tokens of a text that is too long, or empty, is a use of this route.
        has_special, text, encode = body.add_special_tokens is not False, body.prompt or "", llm.tokenizer.encode
        ids = await state.off_loop(body_size(request), lambda: encode(text, add_special_tokens=has_special))
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": llm.model_info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [llm.tokenizer.token(token_id) for token_id in ids]
    return json_response(answer)


async def detokenize(request: Request, state: ServerState) -> Response:
    """The text of ids."""
    body = await read_body(request, DetokenizeRequest, state)
    llm = state.engine()
    state.check_model(body.model)
    if llm.tokenizer is None:
        raise InvalidRequestError("the tokenizer is off", field="tokens")
    if len(body.tokens) > _MAX_TOKENS:
        raise InvalidRequestError(f"tokens holds {len(body.tokens)} ids, the limit is {_MAX_TOKENS}", field="tokens")
    limit = llm.model_info.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < limit:
            raise InvalidRequestError(
                f"tokens holds {token_id}; ids go from 0 to {limit - 1}", field="tokens", value=token_id
            )
    text = llm.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})
