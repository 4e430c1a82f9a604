"""A device that computes nothing: an engine without torch, whose tokens are a function of the prompt.

A one-file plugin, so that an engine process finds it. What it does wrong is asked for by the first token of a prompt.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rabbet.contracts import (
    register_attention_backend,
    register_executor,
    register_linear_backend,
    register_model,
    register_platform,
    register_weight_format,
)
from rabbet.contracts.attention import AttentionBackend
from rabbet.contracts.executor import Executor, MemoryReport
from rabbet.contracts.linear import LinearBackend
from rabbet.contracts.model import Model
from rabbet.contracts.platform import BatchDefaults, DeviceInfo, Platform
from rabbet.contracts.weights import ModelFiles, WeightFormat
from rabbet.errors import EngineDeadError, WeightsError
from rabbet.types.kv import KVCacheSpec
from rabbet.types.outputs import StepResult, TokenLogprobs

VOCAB_SIZE = 300
FAIL_STEP, FAIL_ROW, EXIT_PROCESS, DEAD_EXECUTOR, BAD_UPDATE = 290, 291, 292, 293, 294
SYSTEM_EXIT, INTERRUPT, PANIC = 295, 296, 297
EXIT_STATUS = 7
END = 256


class Panic(BaseException):
    """What a panic of compiled code looks like: no Exception, and no wish to end the process."""


RAISED = {SYSTEM_EXIT: SystemExit(0), INTERRUPT: KeyboardInterrupt(), PANIC: Panic("index out of bounds")}


def token_of(prompt: list[int], index: int) -> int:
    """The token that the null device generates as the ``index``-th: a letter."""
    return 97 + (sum(prompt) * 31 + index * 7 + index * index) % 26


def tokens_of(prompt: list[int], count: int) -> list[int]:
    """The first ``count`` of them."""
    return [token_of(prompt, index) for index in range(count)]


class NullRunner:
    """Rows of requests; each step gives every row that reached its last token one more."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[list[int], int]] = {}
        self.is_dead = False

    def run(self, plan: Any) -> StepResult:
        for request_id in plan.finished_request_ids:
            self.rows.pop(request_id, None)
        computed = {item.request_id: item.num_computed_tokens for item in plan.running_requests}
        for item in plan.new_requests:
            prompt = item.token_ids[: item.num_prompt_tokens]
            self.rows[item.request_id] = (prompt, len(item.token_ids))
            computed[item.request_id] = item.num_computed_tokens
        sampled: dict[str, list[int]] = {}
        failed: dict[str, str] = {}
        for request_id, count in plan.num_scheduled_tokens.items():
            prompt, known = self.rows[request_id]
            self._misbehave(prompt, request_id, failed)
            if computed[request_id] + count >= known and request_id not in failed:
                sampled[request_id] = [token_of(prompt, known - len(prompt))]
                self.rows[request_id] = (prompt, known + 1)
        logprobs = {
            item: [TokenLogprobs(token_ids=[ids[0], END], logprobs=[-0.5, -1.5], ranks=[1, 2])]
            for item, ids in sampled.items()
        }
        return StepResult(step_id=plan.step_id, sampled_token_ids=sampled, failed=failed, logprobs=logprobs)

    def _misbehave(self, prompt: list[int], request_id: str, failed: dict[str, str]) -> None:
        if prompt[0] in RAISED:
            raise RAISED[prompt[0]]
        if prompt[0] == FAIL_STEP:
            raise RuntimeError("a kernel failed at 0xdeadbeef")
        if prompt[0] == FAIL_ROW:
            failed[request_id] = "NaN in the logits"
        if prompt[0] == EXIT_PROCESS:
            os._exit(EXIT_STATUS)
        if prompt[0] == DEAD_EXECUTOR:
            self.is_dead = True
            raise RuntimeError("a rank is gone")


@register_executor("hollow")
class NullExecutor(Executor):
    """Runs a plan when it is given."""

    @classmethod
    def supports(cls, query: Any) -> tuple[Any, ...]:
        return ()

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.runner = NullRunner()
        self.is_shut_down = False

    def load(self) -> dict[str, KVCacheSpec]:
        options = self.config.config.additional_config
        if options.get("fail_load"):
            raise WeightsError("the checkpoint has no tensor 'lm_head.weight'")
        if options.get("exit_load"):
            os._exit(EXIT_STATUS)
        if options.get("leave_load"):
            raise SystemExit(0)
        size = self.config.block_size
        spec = KVCacheSpec(
            block_size=size, num_kv_heads=1, head_dim=1, head_dim_v=1, dtype="int8", page_size_bytes=2 * size
        )
        return {"layers.0": spec, "layers.1": spec}

    def profile_memory(self) -> MemoryReport:
        available = self.config.kv_cache_memory_bytes or (1 << 20)
        return MemoryReport(
            total_bytes=1 << 30, weights_bytes=1 << 20, activation_bytes=0, available_kv_bytes=available
        )

    def initialize_cache(self, config: Any) -> None:
        return None

    def execute(self, plan: Any) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        try:
            future.set_result(self.runner.run(plan))
        except BaseException as error:  # as a thread pool does
            future.set_exception(error)
        return future

    def check_health(self) -> None:
        if self.runner.is_dead:
            raise EngineDeadError("rank 0 has ended")

    def shutdown(self) -> None:
        self.is_shut_down = True


@register_platform("hollow")
class NullPlatform(Platform):
    """Always there."""

    device_type = "hollow"

    @classmethod
    def detect(cls) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo(index=0, name="hollow", arch="hollow", total_memory_bytes=1 << 30),)

    @classmethod
    def supports(cls, query: Any) -> tuple[Any, ...]:
        return ()

    @classmethod
    def batch_defaults(cls, *, is_server: bool, world_size: int) -> BatchDefaults:
        return BatchDefaults(max_num_batched_tokens=64, max_num_seqs=8, memory_fraction=0.5)

    def init_device(self, *, local_rank: int, world_size: int) -> Any:
        raise AssertionError("no torch here")

    def memory(self) -> Any:
        raise AssertionError("no torch here")


@register_weight_format("hollow")
class NullFormat(WeightFormat):
    """A directory with a tokenizer and a config.json; taken by name only, so that tests in this process stay apart."""

    @classmethod
    def matches(cls, query: Any) -> bool:
        return False

    @classmethod
    def resolve(cls, query: Any) -> ModelFiles:
        directory = Path(query.model)
        path = directory / "generation_config.json"
        generation = json.loads(path.read_text()) if path.is_file() else {}
        config = {
            "architectures": ["NullForCausalLM"],
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 4,
            "num_attention_heads": 1,
            "max_position_embeddings": 1 << 20,
            "eos_token_id": END,
        }
        return ModelFiles(
            name="hollow", config=config, weight_files=(), tokenizer_dir=directory, generation_config=generation
        )

    @classmethod
    def infos(cls, files: ModelFiles) -> tuple[Any, ...]:
        return ()

    @classmethod
    def tensors(cls, files: ModelFiles) -> Any:
        return iter(())


@register_model("NullForCausalLM")
class NullModel(Model):
    """Never built."""

    @classmethod
    def supports(cls, query: Any) -> tuple[Any, ...]:
        return ()

    def __init__(self, *, config: Any, context: Any) -> None:
        raise AssertionError("no torch here")

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Any:
        raise AssertionError("no torch here")

    def compute_logits(self, hidden_TN: Any) -> Any:
        raise AssertionError("no torch here")

    @classmethod
    def weight_rules(cls, config: Any) -> Any:
        raise AssertionError("no torch here")


@register_attention_backend("hollow")
class NullAttention(AttentionBackend):
    """Never built."""

    @classmethod
    def supports(cls, query: Any) -> tuple[Any, ...]:
        return ()

    @classmethod
    def kv_layout(cls, spec: KVCacheSpec) -> Any:
        raise AssertionError("no torch here")

    @classmethod
    def block_sizes(cls) -> tuple[int, ...]:
        return (4,)

    def build_metadata(self, batch: Any) -> Any:
        raise AssertionError("no torch here")

    def forward(
        self, layer: Any, q_THD: Any, k_TKD: Any, v_TKE: Any, kv_cache: Any, metadata: Any, out_THE: Any
    ) -> None:
        raise AssertionError("no torch here")


@register_linear_backend("hollow")
class NullLinear(LinearBackend):
    """Never built."""

    @classmethod
    def supports(cls, query: Any) -> tuple[Any, ...]:
        return ()

    def pack(self, weight_OI: Any) -> Any:
        raise AssertionError("no torch here")

    def apply(self, x_TI: Any, packed: Any, bias_O: Any = None) -> Any:
        raise AssertionError("no torch here")
