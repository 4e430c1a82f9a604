"""What stands before the routes: keys on everything but probes, bounded bodies, harmless ids, no CORS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rabbet.server.middleware import PUBLIC_PATHS

KEY = {"Authorization": "Bearer secret-1"}
COMPLETIONS = "/v1/completions"


@pytest.fixture
def locked(make_site: Callable[..., Any]) -> Any:
    return make_site(api_key=["secret-1", "secret-2"])


def asgi(site: Any, **scope: Any) -> list[dict[str, Any]]:
    """Messages of the application for a hand-made scope."""
    sent: list[dict[str, Any]] = []
    full = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http", "path": "/", "raw_path": b"/",
        "query_string": b"", "root_path": "", "headers": [], "server": ("x", 80), "client": ("y", 1), "state": {},
    } | scope  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    site.run(site.app(full, receive, send))
    return sent


def test_every_route_but_the_probes_needs_a_key(locked: Any) -> None:
    """Of whatever is registered, also later: default deny."""
    locked.app.add_api_route("/plugin/secret", lambda: "secret")
    paths = {route.path.replace("{name:path}", "scripted") for route in locked.app.routes} | {"/nowhere"}
    assert {"/docs", "/openapi.json", "/metrics", "/tokenize", COMPLETIONS} <= paths
    for path in paths:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
            answer = locked.ask(method, path)
            if path in PUBLIC_PATHS:
                assert answer.status_code in (200, 405), (method, path)
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "path",
    ["/v1//models", "//v1/models", "/v1/models/", "/V1/models", "/v1/%2e%2e/v1/models", "/health/../v1/models", "/health/x", "/healthx", "/v1%2Fmodels", "/docs/oauth2-redirect"],
)  # fmt: skip
def test_no_spelling_of_a_path_gets_around_the_key(locked: Any, path: str) -> None:
    assert locked.get(path).status_code == 401


def test_only_the_scopes_path_decides(locked: Any) -> None:
    for headers in ([(b"host", b"x/health?")], [(b"host", b"health"), (b"x-original-url", b"/health")]):
        assert asgi(locked, path="/v1/models", raw_path=b"/health", headers=headers)[0]["status"] == 401
    for path, status in (("http://x/v1/models", 401), ("http://x/health/../v1/models", 401), ("http://x/health", 200)):
        assert asgi(locked, path=path, raw_path=path.encode())[0]["status"] == status
    assert asgi(locked, type="websocket", path="/health") == [{"type": "websocket.close", "code": 1008}]


def test_root_path_opens_nothing(make_site: Callable[..., Any]) -> None:
    site = make_site(api_key=["secret-1"], root_path="/api")
    assert site.get("/api/health").status_code == site.get("/health").status_code == 200
    assert site.get("/api/v1/models").status_code == site.get("/apihealth").status_code == 401
    assert site.get("/api/api/health").status_code == 401
    assert site.get("/api/v1/models", headers=KEY).status_code == 200


@pytest.mark.parametrize("key", ["secret-1", "secret-2"])
def test_any_of_the_keys_opens(locked: Any, key: str) -> None:
    assert locked.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer secret-3"}, {"Authorization": "Bearer "}, {"Authorization": "Basic secret-1"}, {"Authorization": "secret-1"},
        {"Authorization": "Bearer secret-1 x"}, {"Authorization": "Bearer " + "x" * 60_000}, [("Authorization", "Bearer secret-1"), ("Authorization", "Bearer secret-1")],
        {"Authorization": b"Bearer \xff\xfe"}, {"X-Api-Key": "secret-1"},
    ],
    ids=lambda headers: str(headers)[:40],
)  # fmt: skip
def test_anything_else_does_not(locked: Any, headers: Any) -> None:
    answer = locked.get("/v1/models?api_key=secret-1", headers=headers)
    assert answer.status_code == 401 and "secret" not in answer.text


def test_no_key_is_needed_where_none_is_configured(site: Any) -> None:
    assert site.get("/v1/models").status_code == 200


def test_cors_is_off_by_default(site: Any) -> None:
    origin = {"Origin": "http://evil"}
    preflight = {**origin, "Access-Control-Request-Method": "POST"}
    for answer in (site.get("/health", headers=origin), site.ask("OPTIONS", COMPLETIONS, headers=preflight)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_cors_can_be_allowed_for_named_origins(make_site: Callable[..., Any]) -> None:
    site = make_site(allowed_origins=["http://good"], api_key=["secret-1"])
    preflight = {"Origin": "http://good", "Access-Control-Request-Method": "POST"}
    answer = site.ask("OPTIONS", COMPLETIONS, headers=preflight)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "http://good")
    evil = site.ask("OPTIONS", COMPLETIONS, headers={**preflight, "Origin": "http://evil"})
    assert "access-control-allow-origin" not in evil.headers
    assert site.post(COMPLETIONS, {"prompt": "x"}, headers={"Origin": "http://good"}).status_code == 401


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [("my-id_1.2", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("a\x1b[31m", False), ("", False), ("\xe9", False), ("http://x", False)],
)  # fmt: skip
def test_request_ids_are_echoed_if_harmless(make_site: Callable[..., Any], sent: str, is_kept: bool) -> None:
    site = make_site(enable_request_id_headers=True, api_key=["secret-1"])
    for headers in ({}, KEY):
        answer = site.get("/v1/models", headers={**headers, "X-Request-Id": sent.encode("latin-1")})
        got = answer.headers["x-request-id"]
        assert (got == sent) == is_kept and (is_kept or len(got) == 32)


def test_request_ids_are_not_echoed_unless_wanted(site: Any) -> None:
    assert "x-request-id" not in site.get("/health", headers={"X-Request-Id": "a"}).headers


def test_equal_request_ids_are_different_requests(site: Any) -> None:
    body = {"prompt": "x", "max_tokens": 2, "request_id": "same"}

    async def both() -> list[Any]:
        headers = {"X-Request-Id": "same"}
        return await asyncio.gather(*(site.http.post(COMPLETIONS, json=body, headers=headers) for _ in range(2)))

    answers = [answer.json() for answer in site.run(both())]
    assert len({answer["id"] for answer in answers}) == 2
    assert len({request.request_id for request in site.engine.requests}) == 2
    assert all(answer["choices"][0]["text"] == "ab" for answer in answers)


def test_a_large_body_is_refused_by_its_length(make_site: Callable[..., Any]) -> None:
    site = make_site(max_body_bytes=1000)
    answer = site.post(COMPLETIONS, {"prompt": "x" * 1000})
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert answer.json()["error"]["type"] == "invalid_request_error" and "1000" in answer.json()["error"]["message"]


def test_a_large_body_without_a_length_is_refused_while_it_comes(make_site: Callable[..., Any]) -> None:
    site = make_site(max_body_bytes=1000)
    read: list[int] = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            read.append(100)
            yield b" " * 100

    answer = site.ask("POST", COMPLETIONS, content=endless(), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert sum(read) <= 1200


def test_a_body_that_does_not_come_is_a_timeout(make_site: Callable[..., Any]) -> None:
    site = make_site(body_limit_s=0.02)

    async def silent() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    answer = site.ask("POST", COMPLETIONS, content=silent(), headers={"content-type": "application/json"})
    assert answer.status_code == 408 and answer.json()["error"]["type"] == "timeout_error"


def test_the_host_of_an_absolute_target_counts_beside_that_of_the_header(make_site: Callable[..., Any]) -> None:
    site = make_site(host="127.0.0.1")
    for target, host, status in (("localhost:1", "localhost", 200), ("evil", "localhost", 403), ("localhost", "evil", 403),
                                 ("localhost@evil", "localhost", 403), ("", "localhost", 403)):  # fmt: skip
        answer = asgi(site, path=f"http://{target}/health", headers=[(b"host", host.encode())])
        assert answer[0]["status"] == status, (target, host)


def test_a_head_that_is_too_long_has_its_status(site: Any) -> None:
    answer = site.get("/health", headers={"X-A": "a" * (64 << 10)})
    assert answer.status_code == 431 and "65536 bytes" in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"
    assert site.get("/health", headers={"X-A": "a" * (60 << 10)}).status_code == 200
