"""Adds the command ``rabbet acme-greet`` and the route ``GET /acme/greet``."""

from rabbet.contracts import register_hooks
from rabbet.contracts.hooks import Hooks, hookimpl


@register_hooks("acme_greeter")
class Greeter(Hooks):
    @hookimpl
    def add_cli_commands(self, app):
        @app.command(name="acme-greet")
        def greet(name: str = "you") -> None:
            """Greet NAME."""
            print(f"acme greets {name}")

    @hookimpl
    def add_http_routes(self, app, llm):
        @app.get("/acme/greet")
        async def greet():
            return {"acme": "greets you"}
