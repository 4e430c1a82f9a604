"""``/docs``: the routes and their fields as one page, made of the OpenAPI description. It loads nothing and runs nothing."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import HTMLResponse, Response

__all__ = ["docs_page"]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "h2{font:1.1em monospace;border-top:1px solid #ccc;padding-top:1em}"
    "table{border-collapse:collapse;margin:.5em 0}td{padding:.1em 1em .1em 0;vertical-align:top}"
)
_HEADERS = {
    # The page holds texts of plugins and, were it ever to show some, of models: nothing in it may run or load.
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


def docs_page(schema: Mapping[str, Any], root_path: str) -> Response:
    """The page.

    Args:
        schema: OpenAPI description; bodies hold no references.
        root_path: Prefix under which clients reach the server.
    """
    info, text = schema["info"], html.escape
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{text(info["title"])}</title>',
        f"<style>{_STYLE}</style><h1>{text(info['title'])} {text(info['version'])}</h1>",
        f'<p>For programs: <a href="{text(root_path)}/openapi.json">openapi.json</a></p>',
    ]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parts += _operation(path, method, operation)
    return HTMLResponse("\n".join(parts), headers=_HEADERS)


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><b>{html.escape(method.upper())}</b> {html.escape(path)}</h2>"
    yield f"<p>{html.escape(operation.get('description') or operation.get('summary') or '')}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    rows = list(_rows(body, ""))
    if rows:
        yield f"<table>{''.join(rows)}</table>"


def _rows(schema: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """A row a field; those of objects in it follow."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in required else "" if field.get("default") is None else str(field["default"])
        cells = (f"<code>{html.escape(prefix + name)}</code>", html.escape(_kind(field)), html.escape(default))
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for kind in (field, *field.get("anyOf", ())):
            yield from _rows(kind, f"{prefix}{name}.")


def _kind(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(kind) for kind in field["anyOf"] if kind.get("type") != "null")
    if "enum" in field:
        return " or ".join(map(str, field["enum"]))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items') or {})}"
    return str(field.get("type", "anything"))
