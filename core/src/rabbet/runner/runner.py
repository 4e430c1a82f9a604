"""The model runner: executes plans on one device. It knows nothing of the scheduler but its plans.

Shapes: T tokens, N hidden size, B rows of logits, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from rabbet.config.resolved import ResolvedConfig
from rabbet.contracts.attention import AttentionBackend, AttentionContext
from rabbet.contracts.batch import AttentionBatch
from rabbet.contracts.executor import MemoryReport, ModelRunner
from rabbet.contracts.platform import MemoryInfo, Platform, SupportsAsyncSteps, SupportsGraphs
from rabbet.errors import PluginLoadError
from rabbet.layers import ForwardContext, set_forward_context
from rabbet.parallel import ParallelState, init_parallel
from rabbet.runner.build import BuiltModel, attention_query, build_model
from rabbet.runner.graphs import DecodeGraphs, capture_sizes, capture_token_sizes
from rabbet.runner.inputs import SampleRow, StepInputs, build_inputs
from rabbet.runner.launch import BAD_LOGITS, Launcher, draw_batch
from rabbet.runner.logits import adjust_logits
from rabbet.runner.logprobs import scores, token_logprobs
from rabbet.runner.memory import kv_budget
from rabbet.runner.processors import Processors
from rabbet.runner.progress import loading_progress
from rabbet.runner.sampler import draw, processed_logits
from rabbet.runner.slots import Slots
from rabbet.types.kv import KVCacheConfig, KVCacheSpec
from rabbet.types.outputs import StepResult, TokenLogprobs
from rabbet.types.plan import NewRequest, StepPlan
from rabbet.types.sampling import SamplingParams

__all__ = ["DeviceRunner"]

logger = logging.getLogger(__name__)
_PROMPT_LOGITS_ROWS = 256
_MEASURED_TOKENS = 1 << 15
"""As many as any default. What a larger step takes is reckoned from it, so that a start does not last as long as that step."""
_NO_TOKEN_LEFT = "allowed_token_ids, bad_words and min_tokens together leave no token to choose"


class DeviceRunner(ModelRunner):
    """See ``ModelRunner``. Lives in one thread from ``load`` on."""

    def __init__(self, resolved: ResolvedConfig, *, rank: int = 0, world_size: int = 1, init_method: str = "") -> None:
        """Keep the configuration; nothing is claimed yet.

        Args:
            resolved: What to run.
            rank: This rank.
            world_size: All ranks.
            init_method: Where ranks meet.
        """
        self._resolved = resolved
        self._rank, self._world_size, self._init_method = rank, world_size, init_method
        self._platform: Platform | None = None
        self._built: BuiltModel | None = None
        self._parallel = ParallelState.single()
        self._device = torch.device("cpu")
        self._caches: dict[str, torch.Tensor] = {}
        self._backends: list[AttentionBackend] = []
        self._cache_config: KVCacheConfig | None = None
        self._slots: Slots | None = None
        self._processors: Processors | None = None
        self._graphs: DecodeGraphs | None = None
        self._launcher: Launcher | None = None
        self._buffers: list[torch.Tensor] = []

    # ---- start

    def load(self) -> None:
        """See ``ModelRunner``."""
        resolved = self._resolved
        self._platform = resolved.composition.build("platform")
        self._platform.device_ids = tuple(str(item) for item in resolved.config.parallel.device_ids or ())
        device = self._platform.init_device(local_rank=self._rank, world_size=self._world_size)
        self._device = resolved.composition.expect("platform", "init_device", device, torch.device)
        self._parallel = init_parallel(
            rank=self._rank,
            world_size=self._world_size,
            init_method=self._init_method,
            backend=self._platform.collective_backend(),
        )
        is_shown = resolved.config.load.use_tqdm_on_load and self._rank == 0
        with loading_progress(resolved, is_shown=is_shown) as progress:
            self._built = build_model(
                resolved, self._platform, device=self._device, parallel=self._parallel, progress=progress
            )

    @property
    def _model(self) -> Any:
        assert self._built is not None, "load() comes first"
        return self._built.model

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """See ``ModelRunner``."""
        assert self._built is not None, "load() comes first"
        return {name: layer.kv_cache_spec() for name, layer in self._built.context.attention_layers.items()}

    @torch.inference_mode()
    def profile_memory(self) -> MemoryReport:
        """See ``ModelRunner``."""
        assert self._platform is not None and self._built is not None
        resolved = self._resolved
        expect = resolved.composition.expect
        num_tokens = min(resolved.max_num_batched_tokens, _MEASURED_TOKENS)
        if num_tokens < resolved.max_num_batched_tokens:
            # What is allocated once, at the first step of all, must not be multiplied.
            self._dummy_step(1)
        before = expect("platform", "memory", self._platform.memory(), MemoryInfo).used_by_process_bytes
        self._dummy_step(num_tokens)
        peak = self._platform.peak_activation_bytes()
        now = expect("platform", "memory", self._platform.memory(), MemoryInfo)
        activation = peak if peak is not None else max(0, now.used_by_process_bytes - before)
        activation = -(-activation * resolved.max_num_batched_tokens // num_tokens)
        return kv_budget(
            now,
            fraction=resolved.memory_fraction,
            weights_bytes=self._built.weights_bytes,
            activation_bytes=activation,
            fixed_bytes=resolved.kv_cache_memory_bytes,
            ceiling_bytes=resolved.max_kv_cache_bytes,
        )

    def _dummy_step(self, num_tokens: int) -> None:
        """A step without a KV cache; refuses a model whose answers have another shape than the contract's."""
        resolved = self._resolved
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        positions = torch.arange(num_tokens, device=self._device) % resolved.max_model_len
        with set_forward_context(ForwardContext(num_tokens=num_tokens)):
            hidden = _shaped(resolved, "forward", self._model.forward(ids, positions), num_tokens)
        rows = hidden[: min(num_tokens, resolved.max_num_seqs)]
        _shaped(resolved, "compute_logits", self._model.compute_logits(rows), len(rows), resolved.vocab_size)

    def initialize_cache(self, config: KVCacheConfig) -> None:
        """See ``ModelRunner``. Pages are not touched, so memory is used only as blocks are."""
        resolved = self._resolved
        backend_class = resolved.composition.load("attention")
        specs = self.kv_cache_specs()
        self._cache_config = config
        self._backends = []
        layouts = {}
        for group in config.groups:
            spec = specs[group.layer_names[0]]
            layouts.update({name: backend_class.kv_layout(specs[name]) for name in group.layer_names})
            layer = self._built.context.attention_layers[group.layer_names[0]]  # type: ignore[union-attr]
            self._backends.append(
                resolved.composition.build(
                    "attention",
                    AttentionContext(
                        spec=spec,
                        query=attention_query(resolved, layer),
                        device=self._device,
                        max_num_tokens=resolved.max_num_batched_tokens,
                        max_num_requests=resolved.max_num_seqs,
                        max_model_len=resolved.max_model_len,
                        options=resolved.options.get(resolved.composition.name("attention") or "", {}),
                    ),
                )
            )
        for tensor in config.tensors:
            # Ranks may hold different numbers of heads, so the size follows from this rank's own layout.
            first = layouts[tensor.layer_names[0]]
            shape = (config.num_blocks, *first.shape)
            raw = torch.empty(shape, dtype=getattr(torch, first.dtype), device=self._device)
            self._buffers.append(raw)
            for name in tensor.layer_names:
                self._caches[name] = raw.view((config.num_blocks, *layouts[name].shape))
        self._processors = Processors(resolved, self._device)
        self._slots = Slots(
            num_slots=resolved.max_num_seqs,
            max_model_len=resolved.max_model_len,
            num_groups=len(config.groups),
            block_size=resolved.block_size,
        )
        platform = self._platform
        assert platform is not None and self._built is not None
        sizes = capture_sizes(resolved, platform, self._backends) if self._model.is_capturable else frozenset()
        if isinstance(platform, SupportsAsyncSteps):
            self._launcher = Launcher(
                platform,
                self._slots,
                device=self._device,
                block_size=resolved.block_size,
                max_model_len=resolved.max_model_len,
                forward=self._forward,
                compute_logits=self._model.compute_logits,
                sizes=sorted(sizes),
                token_sizes=capture_token_sizes(resolved, self._backends, self._built.weights_bytes) if sizes else (),
            )
        elif sizes and isinstance(platform, SupportsGraphs):
            self._graphs = DecodeGraphs(platform, self._slots, self._compute, sizes, resolved.max_model_len)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """One request of one step, so that lazy allocations and kernels are in place; then the graphs."""
        assert self._cache_config is not None
        blocks = [[1] for _ in self._cache_config.groups]
        request = NewRequest(
            request_id="warm-up",
            token_ids=[0, 0],
            num_prompt_tokens=2,
            num_computed_tokens=0,
            block_ids=blocks,
            sampling=SamplingParams(temperature=0.0),
            seed=0,
        )
        self.execute(StepPlan(step_id=0, new_requests=[request], num_scheduled_tokens={"warm-up": 2}))
        assert self._slots is not None and self._processors is not None
        self._processors.remove(self._slots.remove("warm-up"))
        if self._launcher is not None:
            self._launcher.capture_all()

    # ---- steps

    def execute(self, plan: StepPlan) -> StepResult:
        """See ``ModelRunner``."""
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """See ``ModelRunner``."""
        slots = self._slots
        assert slots is not None and self._processors is not None, "initialize_cache() comes first"
        for request_id in plan.finished_request_ids:
            self._processors.remove(slots.remove(request_id))
        for new in plan.new_requests:
            self._processors.add(slots.add(new), slots)
        for running in plan.running_requests:
            slots.update(running)
        if self._launcher is not None and plan.num_scheduled_tokens:
            if not self._processors and self._launcher.is_possible(plan):
                return self._launcher.launch(plan)
            self._launcher.settle()
        result = self._run(plan, slots) if plan.num_scheduled_tokens else StepResult(step_id=plan.step_id)
        return lambda: result

    def _run(self, plan: StepPlan, slots: Slots) -> StepResult:
        """A step from beginning to end."""
        inputs = build_inputs(plan, slots, block_size=self._resolved.block_size, device=self._device)
        logits = self._graphs.run(inputs) if self._graphs is not None else None
        if logits is not None:
            return self._sample(plan, inputs, logits, {})
        hidden = self._forward(inputs.input_ids, inputs.positions, inputs.batches)
        prompt_logprobs = self._prompt_logprobs(inputs, hidden)
        if not inputs.sample_rows:
            return StepResult(step_id=plan.step_id, prompt_logprobs=prompt_logprobs)
        logits = self._model.compute_logits(hidden[inputs.sample_index])
        return self._sample(plan, inputs, logits, prompt_logprobs)

    def _compute(self, input_ids: torch.Tensor, positions: torch.Tensor, batches: list[AttentionBatch]) -> torch.Tensor:
        """Logits of every row."""
        return self._model.compute_logits(self._forward(input_ids, positions, batches))  # type: ignore[no-any-return]

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batches: list[AttentionBatch]) -> torch.Tensor:
        assert self._cache_config is not None
        metadata: dict[str, Any] = {}
        backends: dict[str, AttentionBackend] = {}
        for group, backend, batch in zip(self._cache_config.groups, self._backends, batches, strict=True):
            made = backend.build_metadata(batch)
            for name in group.layer_names:
                metadata[name] = made
                backends[name] = backend
        context = ForwardContext(
            kv_caches=self._caches, metadata=metadata, backends=backends, num_tokens=batches[0].num_tokens
        )
        with set_forward_context(context):
            return self._model.forward(input_ids, positions)  # type: ignore[no-any-return]

    def _sample(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        logits: torch.Tensor,
        prompt_logprobs: dict[str, list[TokenLogprobs]],
    ) -> StepResult:
        assert self._slots is not None
        rows = inputs.sample_rows
        mode = self._resolved.config.model.logprobs_mode
        wanted = [
            i
            for i, sample in enumerate(rows)
            if sample.row.sampling.logprobs is not None or sample.row.sampling.logprob_token_ids is not None
        ]
        raw = scores(logits[wanted], mode) if wanted and mode.startswith("raw") else None
        logits = logits.float()
        is_bad = (~torch.isfinite(logits.amax(dim=-1))).tolist()
        problems = {i: BAD_LOGITS for i, bad in enumerate(is_bad) if bad}
        problems |= dict.fromkeys(adjust_logits(logits, rows, self._slots), _NO_TOKEN_LEFT)
        if self._processors:
            # Not told of rows that fail already: these keep their own reason.
            logits[list(problems)] = 0.0
            problems = self._processors.apply(logits, rows, self._slots) | problems
        # Nothing can be drawn from these, and trying to must not fail the others.
        logits[list(problems)] = 0.0
        if wanted and raw is None:
            raw = scores(processed_logits(logits[wanted], [rows[i] for i in wanted]), mode)
        tokens = self._draw(logits, rows).tolist()
        sampled: dict[str, list[int]] = {}
        failed: dict[str, str] = {}
        logprobs: dict[str, list[TokenLogprobs]] = {}
        place = {index: position for position, index in enumerate(wanted)}
        index = 0
        for request_id, count in inputs.num_sampled.items():
            drafts = plan.draft_token_ids.get(request_id, [])
            accepted = _accept(tokens[index : index + count], drafts)
            row = rows[index].row
            problem = next((problems[i] for i in range(index, index + len(accepted)) if i in problems), None)
            if problem is not None:
                failed[request_id] = problem
            else:
                sampled[request_id] = accepted
                self._slots.append_tokens(row.slot, accepted)
                if index in place:
                    assert raw is not None
                    sampling = row.sampling
                    logprobs[request_id] = [
                        token_logprobs(raw[place[index + i]], token, sampling.logprobs or 0, sampling.logprob_token_ids)
                        for i, token in enumerate(accepted)
                    ]
            index += count
        return StepResult(
            step_id=plan.step_id,
            sampled_token_ids=sampled,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed=failed,
        )

    def _draw(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        """A token a row. Where the platform draws, it draws all tokens: a request's must not depend on its company."""
        platform, slots = self._platform, self._slots
        assert slots is not None
        if not isinstance(platform, SupportsAsyncSteps):
            return draw(logits, rows)
        index, output_index = [sample.row.slot for sample in rows], [sample.output_index for sample in rows]
        return platform.draw(logits, draw_batch(slots, index, output_index, self._device))

    def _prompt_logprobs(self, inputs: StepInputs, hidden: torch.Tensor) -> dict[str, list[TokenLogprobs]]:
        """For requests that asked: entries of the prompt positions that this step's rows predict."""
        assert self._slots is not None
        found: dict[str, list[TokenLogprobs]] = {}
        for i, row in enumerate(inputs.rows):
            count = row.sampling.prompt_logprobs
            if count is None:
                continue
            start, end = int(inputs.query_start[i]), int(inputs.query_start[i + 1])
            first = int(self._slots.num_computed[row.slot])
            # The row at position p predicts p + 1, which must be a prompt position.
            num_rows = min(end - start, row.num_prompt_tokens - 1 - first)
            entries: list[TokenLogprobs] = []
            for offset in range(0, max(0, num_rows), _PROMPT_LOGITS_ROWS):
                part = hidden[start + offset : start + min(offset + _PROMPT_LOGITS_ROWS, num_rows)]
                values = scores(self._model.compute_logits(part), self._resolved.config.model.logprobs_mode)
                for j in range(part.shape[0]):
                    token = int(self._slots.token_ids[row.slot, first + offset + j + 1])
                    entries.append(token_logprobs(values[j], token, count))
            if entries:
                found[row.request_id] = entries
        return found

    def close(self) -> None:
        """See ``ModelRunner``."""
        self._graphs = self._launcher = None
        self._caches.clear()
        self._buffers.clear()
        self._backends.clear()
        self._built = None
        self._slots = None
        self._processors = None
        if self._world_size > 1 and self._parallel.group is not None:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
        self._parallel = ParallelState.single()


def _accept(tokens: list[int], drafts: list[int]) -> list[int]:
    """The drawn tokens up to the first that differs from its draft, that one included."""
    for i, draft in enumerate(drafts):
        if tokens[i] != draft:
            return tokens[: i + 1]
    return tokens


def _shaped(resolved: ResolvedConfig, method: str, answer: Any, *shape: int) -> torch.Tensor:
    """What the model's ``method`` returned: a tensor whose first sizes are ``shape``."""
    tensor: torch.Tensor = resolved.composition.expect("model", method, answer, torch.Tensor)
    if tensor.shape[: len(shape)] != shape:
        name, told = resolved.composition.name("model"), f"shape {tuple(tensor.shape)}, but must return {shape}"
        raise PluginLoadError(f"model/{name} is broken: {method}() returned {told}", kind="model", name=name)
    return tensor
