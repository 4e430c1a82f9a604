"""A web page drives the local server: hosts that are not ours are refused on loopback, no page of ours loads from outside."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1", "127.0.0.7"])
@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost", True), ("localhost:8000", True), ("LOCALHOST.:8000", True), ("127.0.0.1:8000", True), ("[::1]:8000", True), ("app.localhost:1", True),
        ("evil", False), ("evil:8000", False), ("localhost.evil", False), ("127.0.0.1.evil", False), ("evil-localhost", False), ("192.168.0.1", False), ("[::2]", False),
        ("x/health?", False), ("localhost@evil", False), ("", False), ("0.0.0.0:8000", False),
    ],
)  # fmt: skip
def test_a_loopback_server_answers_for_loopback_names_only(
    make_site: Callable[..., Any], bound: str, host: str, is_ours: bool
) -> None:
    """DNS rebinding: the page's own name points here, and the browser sends it as Host."""
    site = make_site(host=bound)
    for path in ("/health", "/v1/models", "/nowhere", "/docs"):
        answer = site.get(path, headers={"Host": host})
        assert (answer.status_code == 403) == (not is_ours), path
        if not is_ours:
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("host_not_allowed", "Host") and "--allowed-hosts" in error[
                "message"
            ]


@pytest.mark.parametrize(
    "options",
    [{}, {"host": "0.0.0.0"}, {"host": "10.0.0.1"}, {"uds": "/x"}, {"host": "127.0.0.1", "allowed_hosts": ["*"]}],
)
def test_other_servers_answer_for_any_host(make_site: Callable[..., Any], options: dict[str, Any]) -> None:
    assert make_site(**options).get("/health", headers={"Host": "api.example"}).status_code == 200


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0", None])
def test_hosts_can_be_named(make_site: Callable[..., Any], bound: str | None) -> None:
    site = make_site(host=bound, allowed_hosts=["api.example", "B.example:443"])
    for host, status in (("api.example:80", 200), ("b.example", 200), ("localhost", 200), ("c.example", 403)):
        assert site.get("/health", headers={"Host": host}).status_code == status
    twice = site.get("/health", headers=[("Host", "api.example"), ("Host", "evil")])
    assert twice.status_code == 403


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_forms_of_other_pages_do_nothing(site: Any, kind: str) -> None:
    """What a page may send without a preflight is no JSON content type."""
    for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"):
        headers = {"Origin": "http://evil", "Content-Type": kind}
        answer = site.ask("POST", path, content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 415 and "access-control-allow-origin" not in answer.headers
    assert not site.engine.requests


@pytest.mark.parametrize("root_path", ["", "/api"])
def test_the_page_of_the_api_loads_nothing_and_names_every_route(make_site: Callable[..., Any], root_path: str) -> None:
    site = make_site(root_path=root_path)
    answer = site.get(f"{root_path}/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    page = answer.text
    assert not re.search(r"<(script|link|img|iframe|form|base)\b|\bon\w+=|https?://|@import|url\(", page)
    schema = site.get(f"{root_path}/openapi.json").json()
    for path, operations in schema["paths"].items():
        for method in operations:
            assert f"{method.upper()}</b> {path}" in page
    for field in ("stream_options", "max_completion_tokens", "truncate_prompt_tokens", "return_token_strs"):
        assert f"<code>{field}</code>" in page
    assert f'href="{root_path}/openapi.json"' in page


def test_what_plugins_describe_cannot_become_markup(site: Any) -> None:
    async def route() -> None:
        """<script>alert(1)</script> & more"""

    site.app.add_api_route("/plugin/<b>", route, methods=["GET"])
    page = site.get("/docs").text
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page and "/plugin/&lt;b&gt;" in page
