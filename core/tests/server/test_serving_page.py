"""docs/serving.md names every route, metric and limit that there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rabbet.server.middleware import PUBLIC_PATHS

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_every_route_is_there_and_said_to_be_public_if_it_is(site: Any, page: str) -> None:
    rows = [line for line in page.splitlines() if line.startswith(("| `GET", "| `POST"))]
    for route in site.app.routes:
        row = next((row for row in rows if route.path.partition("{")[0].rstrip("/") in row), "")
        assert row, route.path
        assert row.endswith("| none |") == (route.path in PUBLIC_PATHS), route.path


def test_every_metric_is_there(site: Any, page: str) -> None:
    for family in text_string_to_metric_families(site.get("/metrics").text):
        if family.name.startswith("rabbet:"):
            name = family.name.removeprefix("rabbet:")
            assert f"`{name}`" in page or f"`{name}{{" in page, name


def test_limits_are_those_of_the_server(site: Any, page: str) -> None:
    config = site.state.config
    for flag, value in (
        ("max-n", config.max_n),
        ("max-prompts", config.max_prompts),
        ("max-outputs", config.max_outputs),
        ("max-stop", config.max_stop),
    ):
        assert f"`--{flag}` | {value} |" in page
    assert config.max_body_bytes == 32 << 20 and "32 MiB" in page
