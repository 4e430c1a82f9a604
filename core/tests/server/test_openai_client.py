"""The openai package drives both routes unchanged: whole and streamed answers, usage, log probabilities, seeds, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rabbet.types.outputs import FinishReason

openai = pytest.importorskip("openai", reason="the client comes with the extra dev")

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture
def client(site: Any) -> Iterator[Any]:
    """Speaks to the application without a socket."""
    yield openai.AsyncOpenAI(base_url="http://site/v1", api_key="none", max_retries=0, http_client=site.http)
    site.run(site.http.aclose())


async def listed(client: Any) -> list[str]:
    return [model.id async for model in client.models.list()]


async def collected(stream: Any) -> list[Any]:
    return [chunk async for chunk in await stream]


def test_models(site: Any, client: Any) -> None:
    assert site.run(listed(client)) == ["scripted", "other"]
    assert site.run(client.models.retrieve("other")).id == "other"


def test_completions_whole_and_streamed(site: Any, client: Any) -> None:
    ask: dict[str, Any] = {"model": "scripted", "prompt": ["a", "b"], "n": 2, "max_tokens": 4, "logprobs": 2}
    whole = site.run(client.completions.create(**ask))
    assert [(c.index, c.text, c.finish_reason) for c in whole.choices] == [(i, "abcd", "length") for i in range(4)]
    assert whole.choices[0].logprobs.tokens == list("abcd") and len(whole.choices[0].logprobs.top_logprobs[0]) == 2
    assert whole.usage.completion_tokens == 16
    options = {"include_usage": True}
    chunks = site.run(collected(client.completions.create(**ask, stream=True, stream_options=options)))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    for index in range(4):
        assert "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index) == "abcd"


def test_chat_whole_and_streamed_with_usage_and_logprobs(site: Any, client: Any) -> None:
    ask: dict[str, Any] = {
        "model": "scripted", "messages": MESSAGES, "max_completion_tokens": 3, "n": 2, "logprobs": True, "top_logprobs": 5,
        "temperature": 0.5, "top_p": 0.9, "user": "me", "store": False, "metadata": {"a": "b"},
    }  # fmt: skip
    whole = site.run(client.chat.completions.create(**ask))
    assert [(c.message.role, c.message.content, c.finish_reason) for c in whole.choices] == [
        ("assistant", "abc", "length")
    ] * 2
    entries = whole.choices[0].logprobs.content
    assert [entry.bytes for entry in entries] == [[97], [98], [99]] and all(len(e.top_logprobs) == 5 for e in entries)
    options = {"include_usage": True}
    chunks = site.run(collected(client.chat.completions.create(**ask, stream=True, stream_options=options)))
    assert chunks[-1].usage == whole.usage and all(chunk.usage is None for chunk in chunks[:-1])
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason == "length"
        assert "".join(c.delta.content or "" for c in mine) == "abc"
        assert [e for c in mine if c.logprobs for e in c.logprobs.content] == entries


def test_the_clients_own_helper_assembles_a_stream(site: Any, client: Any) -> None:
    async def work() -> Any:
        async with client.chat.completions.stream(model="scripted", messages=MESSAGES) as stream:
            return await stream.get_final_completion()

    # The helper takes an answer that was cut by its length for an error, so this one ends by itself.
    site.engine.script = lambda _request: [97, 98, 99, 256]
    assert site.run(work()).choices[0].message.content == "abc"


def test_stop_and_extra_fields_reach_the_engine(site: Any, client: Any) -> None:
    answer = site.run(
        client.chat.completions.create(
            model="scripted", messages=MESSAGES, stop=["cd"], seed=7, extra_body={"top_k": 3, "min_tokens": 1}
        )
    )
    assert answer.choices[0].message.content == "ab" and answer.choices[0].finish_reason == "stop"
    sampling = site.engine.requests[0].sampling
    assert (sampling.seed, sampling.top_k, sampling.min_tokens) == (7, 3, 1)


def test_seeds_differ_between_outputs_and_agree_between_calls(site: Any, client: Any) -> None:
    for _ in range(2):
        site.run(client.completions.create(model="scripted", prompt=["a", "b"], n=2, seed=7, max_tokens=1))
    seeds = [request.sampling.seed for request in site.engine.requests]
    assert len(set(seeds)) == 4 and sorted(seeds[:4]) == sorted(seeds[4:])


@pytest.mark.parametrize(
    ("ask", "kind", "param"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model"), ({"n": 1000}, openai.BadRequestError, "n"), ({"messages": []}, openai.BadRequestError, "messages"),
        ({"tool_choice": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
    ],
    ids=["model", "n", "messages", "tools"],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own(
    site: Any, client: Any, ask: dict[str, Any], kind: Any, param: str, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        site.run(client.chat.completions.create(**{"model": "scripted", "messages": MESSAGES, "stream": stream, **ask}))
    assert caught.value.param == param and caught.value.body["message"]


def test_an_error_in_a_stream_is_raised_by_the_client(site: Any, client: Any) -> None:
    site.engine.script = lambda _request: [97, 98, {"finish_reason": FinishReason.ERROR, "error": "the kernel failed"}]
    with pytest.raises(openai.APIError, match="failed"):
        site.run(collected(client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)))


def test_keys_are_the_clients_own(make_site: Callable[..., Any]) -> None:
    site = make_site(api_key=["right"])

    def ask(key: str) -> Any:
        return site.run(
            listed(openai.AsyncOpenAI(base_url="http://site/v1", api_key=key, max_retries=0, http_client=site.http))
        )

    assert ask("right") == ["scripted", "other"]
    with pytest.raises(openai.AuthenticationError):
        ask("wrong")


def test_raw_answers_hold_what_the_reference_adds(site: Any, client: Any) -> None:
    raw = site.run(
        client.chat.completions.with_raw_response.create(
            model="scripted", messages=MESSAGES, max_tokens=2, extra_body={"return_token_ids": True}
        )
    )
    assert json.loads(raw.content)["choices"][0]["token_ids"] == [97, 98]
