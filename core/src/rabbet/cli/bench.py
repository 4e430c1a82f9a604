"""``rabbet bench``: throughput and latency offline, requests a second against a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rabbet.errors import RabbetError, shorten

__all__ = ["app"]

app = typer.Typer(help="Measure throughput, latency, or a running server.", no_args_is_help=True)
_MAX_LEN = 10_000_000
_RAW = {"allow_extra_args": True, "ignore_unknown_options": True}
_Output = Annotated[Path | None, typer.Option("--output-json", help="Write the figures to this file too")]
_Seed = Annotated[int, typer.Option("--seed", help="Seed of the random prompts")]
_Lengths = Annotated[str, typer.Option(help="Tokens: N, or LOW:HIGH for uniform lengths")]


@app.command(context_settings=_RAW)
def throughput(
    context: typer.Context,
    *,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1)] = 64,
    input_len: _Lengths = "64:512",
    output_len: _Lengths = "32:128",
    prefix_len: Annotated[int, typer.Option("--prefix-len", help="Tokens that all prompts share", min=0)] = 0,
    seed: _Seed = 0,
    repeat: Annotated[int, typer.Option("--repeat", help="Runs; the median is reported", min=1)] = 1,
    output_json: _Output = None,
) -> None:
    """Tokens a second of a batch of random prompts: rabbet bench throughput MODEL [serve options]."""
    from rabbet.cli.bench_offline import Shape, run_throughput

    shape = Shape(num_prompts, _range(input_len), _range(output_len), prefix_len, seed)
    _report(run_throughput(context.args, shape, repeat=repeat), output_json)


@app.command(context_settings=_RAW)
def latency(
    context: typer.Context,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1)] = 1,
    input_len: Annotated[int, typer.Option("--input-len", min=1)] = 128,
    output_len: Annotated[int, typer.Option("--output-len", min=1)] = 128,
    seed: _Seed = 0,
    repeat: Annotated[int, typer.Option("--repeat", min=1)] = 5,
    output_json: _Output = None,
) -> None:
    """Time to the first token and time a token: rabbet bench latency MODEL [serve options]."""
    from rabbet.cli.bench_offline import Shape, run_latency

    shape = Shape(batch_size, (input_len, input_len), (output_len, output_len), 0, seed)
    _report(run_latency(context.args, shape, repeat=repeat), output_json)


@app.command()
def serve(
    *,
    url: Annotated[str, typer.Option("--url", help="Base URL of the server")] = "http://127.0.0.1:8000/v1",
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key", envvar="RABBET_API_KEY")] = None,
    num_clients: Annotated[
        int, typer.Option("--num-clients", help="Requests under way at once", min=1, max=10_000)
    ] = 16,
    duration_s: Annotated[float, typer.Option("--duration", help="Seconds", min=0, max=1e6)] = 60.0,
    input_len: _Lengths = "64:512",
    output_len: _Lengths = "32:128",
    seed: _Seed = 0,
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Ids of prompts are drawn below it", min=11)] = 10_000,
    output_json: _Output = None,
) -> None:
    """Requests a second of a running server under a fixed number of clients."""
    from rabbet.cli.bench_server import Load, run_load

    load = Load(
        url=url,
        api_key=api_key,
        num_clients=num_clients,
        duration_s=duration_s,
        input_len=_range(input_len),
        output_len=_range(output_len),
        seed=seed,
        vocab_size=vocab_size,
    )
    _report(run_load(load), output_json)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        values = (int(low), int(high or low))
    except ValueError:
        raise typer.BadParameter(f"{shorten(text)} is neither N nor LOW:HIGH") from None
    if not 1 <= values[0] <= values[1] <= _MAX_LEN:
        raise typer.BadParameter(f"{shorten(text)} must have 1 <= LOW <= HIGH <= {_MAX_LEN}")
    return values


def _report(figures: dict[str, Any], path: Path | None) -> None:
    width = max(len(key) for key in figures)
    for key, value in figures.items():
        typer.echo(f"{key:{width}}  {value:.4g}" if isinstance(value, float) else f"{key:{width}}  {value}")
    if path is None:
        return
    try:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RabbetError(f"--output-json {path} cannot be written: {error.strerror}") from error
