"""The offline front end, on an engine that computes nothing."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rabbet import LLM, SamplingParams
from rabbet.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from rabbet.front.base import derive_seed


@pytest.fixture(scope="module")
def llm(null: ModuleType, model_dir: Path, options: dict[str, Any]) -> Iterator[LLM]:
    with LLM(str(model_dir), engine_process=False, **options) as llm:
        yield llm


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_outputs_stand_in_the_order_of_the_prompts(llm: LLM, null: ModuleType) -> None:
    prompts: list[Any] = ["a", [1, 2], {"prompt": "bc"}, {"prompt_token_ids": [3]}]
    params = [SamplingParams(max_tokens=count) for count in (40, 3, 20, 1)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    ids = [[257, 97], [1, 2], [257, 98, 99], [3]]
    assert [output.prompt_token_ids for output in outputs] == ids
    assert tokens(outputs) == [null.tokens_of(p, s.max_tokens) for p, s in zip(ids, params, strict=True)]
    assert outputs[0].prompt == "a" and outputs[1].prompt is None
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert outputs[0].outputs[0].text == bytes(tokens(outputs)[0]).decode()
    assert len({output.request_id for output in outputs}) == 4


@pytest.mark.parametrize("prompt", ["a", [257, 97], {"prompt": "a"}])
def test_one_prompt_may_stand_alone(llm: LLM, prompt: Any) -> None:
    assert len(llm.generate(prompt, use_tqdm=False)) == 1


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


def test_chat_is_the_template_and_generate(llm: LLM, null: ModuleType) -> None:
    conversation = [{"role": "user", "content": "A"}]
    (one,) = llm.chat(conversation, SamplingParams(max_tokens=4), use_tqdm=False)
    assert one.prompt == "<start>[user]A[assistant]" and one.prompt_token_ids.count(257) == 1
    assert one.outputs[0].token_ids == null.tokens_of(one.prompt_token_ids, 4)
    several = llm.chat([conversation, conversation], SamplingParams(max_tokens=4), use_tqdm=False)
    assert tokens(several) == tokens([one]) * 2
    (continued,) = llm.chat(
        [*conversation, {"role": "assistant", "content": "B"}], continue_final_message=True, use_tqdm=False
    )
    assert continued.prompt == "<start>[user]A[assistant]B"


def test_max_tokens_beyond_the_context_is_lowered(llm: LLM) -> None:
    (output,) = llm.generate([[1] * 500], SamplingParams(max_tokens=10**30), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12 and output.outputs[0].finish_reason == "length"


def test_a_wrong_prompt_in_a_list_starts_nothing(llm: LLM) -> None:
    before = llm.get_metrics().num_steps
    with pytest.raises(ContextLengthError, match="512"):
        llm.generate([[1], [1] * 600], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="2 sampling_params were given for 1 prompts"):
        llm.generate([[1]], [SamplingParams(), SamplingParams()], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="priorities"):
        llm.generate([[1]], priority=[1, 2], use_tqdm=False)
    assert llm.get_metrics().num_steps == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"priority": 1 << 70}, "priority is 1180591620717411303424, but must lie between"),
        ({"priority": "x"}, "priority is 'x', but must be an integer"), ({"priority": [None]}, "priority is None, but must be"),
        ({"priority": float("nan")}, "priority is nan, but must be an integer"), ({"priority": None}, "priority is None"),
        ({"sampling_params": {"max_tokens": 2}}, "sampling_params is {'max_tokens': 2}, but must be SamplingParams"),
        ({"sampling_params": [3]}, "sampling_params is 3, but must be"), ({"sampling_params": "x"}, "sampling_params is 'x'"),
        ({"sampling_params": SamplingParams(extra_args={"a": object()})}, "extra_args holds a object under 'a'"),
        ({"sampling_params": SamplingParams(extra_args={"a": 1 << 70})}, "extra_args holds 1180591620717411303424 under 'a'"),
        ({"sampling_params": SamplingParams(extra_args={"a": "\ud800"})}, "extra_args holds '.ud800' under 'a'"),
        ({"sampling_params": SamplingParams(extra_args=[1])}, r"extra_args is \[1\], but must be a dict"),
        ({"prompts": None}, "prompt"), ({"prompts": 3}, "prompt"), ({"prompts": b"x"}, "prompt"), ({"prompts": 1.5}, "prompt"),
    ],
    ids=str,
)  # fmt: skip
def test_what_no_message_can_carry_is_refused_by_name(llm: LLM, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(**{"prompts": [[1]], "use_tqdm": False, **given})
    assert llm.generate([[1]], use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_one_failed_request_leaves_the_others(llm: LLM, null: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    outputs = llm.generate([[1], [null.FAIL_ROW], [2]], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].error == "NaN in the logits"
    assert "1 outputs failed" in caplog.text


def test_if_all_failed_it_is_an_error(llm: LLM, null: ModuleType) -> None:
    with pytest.raises(RequestFailedError, match="NaN in the logits"):
        llm.generate([[null.FAIL_ROW]], use_tqdm=False)


def test_a_shared_seed_gives_every_prompt_and_output_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int | None] = []
    original = llm._front.client.add
    monkeypatch.setattr(
        llm._front.client, "add", lambda request: (seeds.append(request.sampling.seed), original(request))
    )
    shared = SamplingParams(seed=-2, n=2, max_tokens=1)
    for _ in range(2):
        llm.generate([[1], [1], [1]], shared, use_tqdm=False)
    assert seeds[:6] == seeds[6:] and len(set(seeds[:6])) == 6 and seeds[0] == -2
    assert None not in seeds and -1 not in seeds
    seeds.clear()
    llm.generate([[1], [1]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert seeds == [None, None]


@pytest.mark.parametrize("seed", [-(2**63), -5, -1 - 1, 0, 7, 2**63 - 1])
def test_derived_seeds_are_seeds(seed: int) -> None:
    derived = [derive_seed(seed, offset) for offset in range(8)]
    assert len(set(derived)) == 8
    assert all(SamplingParams(seed=item).seed == item for item in derived)


def test_several_outputs_of_a_prompt(llm: LLM) -> None:
    (output,) = llm.generate([[1]], SamplingParams(n=3, max_tokens=2), use_tqdm=False)
    assert [item.index for item in output.outputs] == [0, 1, 2]
    assert all(item.finish_reason == "length" for item in output.outputs)


def test_several_threads_may_use_it(llm: LLM, null: ModuleType) -> None:
    results: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        results[number] = tokens(llm.generate([[number + 1, i + 1] for i in range(5)], use_tqdm=False))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [null.tokens_of([n + 1, i + 1], 16) for i in range(5)] for n in range(4)}


def test_the_progress_bar_can_be_ones_own(llm: LLM) -> None:
    class Bar:
        total, done, closed = 0, 0, False

        def update(self, count: int) -> None:
            self.done += count

        def close(self) -> None:
            self.closed = True

    bar = Bar()

    def make(*, total: int, **_: Any) -> Bar:
        bar.total = total
        return bar

    llm.generate([[1], [2]], use_tqdm=make)
    assert (bar.total, bar.done, bar.closed) == (2, 2, True)


def test_the_models_defaults_are_used(model_dir: Path, options: dict[str, Any], tmp_path: Path) -> None:
    for path in model_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 9, "max_new_tokens": 3}))
    with LLM(str(tmp_path), engine_process=False, **options) as llm:
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.5, 9, 3)
        (output,) = llm.generate("a", use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
        (longer,) = llm.generate("a", SamplingParams(max_tokens=9), use_tqdm=False)
        assert len(longer.outputs[0].token_ids) == 9, "a default, no ceiling"


def test_a_full_queue_is_said(model_dir: Path, options: dict[str, Any]) -> None:
    with LLM(str(model_dir), engine_process=False, max_num_queued_reqs=1, max_num_seqs=1, **options) as llm:
        with pytest.raises(OverloadedError):
            llm.generate([[1]] * 300, SamplingParams(max_tokens=300), use_tqdm=False)
        assert llm.generate([[1]], use_tqdm=False)


def test_unknown_options_are_refused_before_anything_starts(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="max-model-len"):
        LLM(str(model_dir), max_modl_len=5)


@pytest.mark.parametrize("engine_process", [True, False])
def test_closed_and_opened_again(engine_process: bool, model_dir: Path, options: dict[str, Any]) -> None:
    for _ in range(2):
        with LLM(str(model_dir), engine_process=engine_process, **options) as llm:
            assert llm.generate([[1]], use_tqdm=False)
            assert llm.reset_prefix_cache() is True
        llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            llm.generate([[1]], use_tqdm=False)


@pytest.mark.parametrize("engine_process", [True, False])
def test_one_that_nobody_holds_ends_its_engine(engine_process: bool, model_dir: Path, options: dict[str, Any]) -> None:
    before = set(threading.enumerate())
    llm = LLM(str(model_dir), engine_process=engine_process, **options)
    assert llm.generate([[1]], use_tqdm=False)
    pid = getattr(llm._front.client, "pid", None)
    threads = set(threading.enumerate()) - before
    assert threads and (pid is not None) == engine_process
    del llm
    gc.collect()
    assert not [thread for thread in threads if thread.is_alive()]
    assert pid is None or not Path(f"/proc/{pid}").exists()


def test_the_death_of_the_engine_ends_generate(null: ModuleType, model_dir: Path, options: dict[str, Any]) -> None:
    with LLM(str(model_dir), **options) as llm:
        with pytest.raises(EngineDeadError, match=f"status {null.EXIT_STATUS}"):
            llm.generate([[1], [null.EXIT_PROCESS], [2]], SamplingParams(max_tokens=200), use_tqdm=False)
        with pytest.raises(EngineDeadError):
            llm.generate([[1]], use_tqdm=False)


INTERRUPTED = """
import json, sys, threading, os, signal
from rabbet import LLM, SamplingParams
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
def interrupt():
    while llm.get_metrics().num_generation_tokens < 5:
        pass
    os.kill(os.getpid(), signal.SIGINT)
thread = threading.Thread(target=interrupt)
thread.start()
try:
    llm.generate([[1], [2]], SamplingParams(max_tokens=90_000))
except KeyboardInterrupt:
    print("interrupted", flush=True)
thread.join()
llm._front.client.call("check_integrity").result(20)
while llm.get_metrics().num_running:
    pass
print(len(llm.generate([[1]], use_tqdm=False)[0].outputs[0].token_ids))
llm.close()
"""


def test_ctrl_c_ends_the_requests_and_not_the_engine(model_dir: Path, options: dict[str, Any]) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(model_dir), json.dumps(options | {"max_model_len": 100_000})]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["interrupted", "16"], done.stderr
    assert done.returncode == 0 and signal.SIGINT


class Panic(BaseException):
    """What a panic in a library of compiled code looks like: no Exception."""


@pytest.mark.parametrize("kind", [OverflowError, Panic])
def test_a_tokenizer_that_fails_ends_that_request_alone(
    kind: type[BaseException], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = llm.get_tokenizer()
    original = tokenizer.decode

    def decode(ids: list[int], **options: Any) -> str:
        if len(ids) > 1 and ids[0] == 99:
            raise kind("no such piece")
        return original(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", decode)
    bad, good = llm.generate([[99], [1]], SamplingParams(max_tokens=9), use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and kind.__name__ in str(bad.outputs[0].error)
    assert good.outputs[0].finish_reason == "length"
