"""Log probabilities as JSON numbers."""

from __future__ import annotations

from rabbet.front.outputs import Logprob
from rabbet.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs


def test_minus_infinity_is_a_number_that_json_has() -> None:
    row = {
        5: Logprob(logprob=-0.5, rank=1, decoded_token="a"),
        6: Logprob(logprob=float("-inf"), rank=2, decoded_token="b"),
    }
    chat = chat_logprobs([5, 6], [row, row], count=2, as_ids=False, tokenizer=None)["content"]
    assert [item["logprob"] for item in (*chat, *chat[0]["top_logprobs"])] == [-0.5, -9999.0, -0.5, -9999.0]
    completion = completion_logprobs([5, 6], [row, row], offsets=[0, 1], as_ids=False, tokenizer=None)
    assert completion["token_logprobs"] == [-0.5, -9999.0]
    assert completion["top_logprobs"][0] == {"a": -0.5, "b": -9999.0}
    prompt = prompt_logprobs([None, row])[1]
    assert prompt is not None and [item["logprob"] for item in prompt.values()] == [-0.5, -9999.0]
