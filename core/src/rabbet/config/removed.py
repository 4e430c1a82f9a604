"""Options that older engines had, what replaced them, and those that are accepted without effect."""

from __future__ import annotations

__all__ = ["NOT_YET", "NO_EFFECT", "REMOVED", "REMOVED_VALUES"]

REMOVED = {
    "num-lookahead-slots": "the scheduler finds room for drafts itself; leave it out",
    "swap-space": "preempted requests are recomputed, not swapped; leave it out",
    "cpu-swap-space": "preempted requests are recomputed, not swapped; leave it out",
    "preemption-mode": "preempted requests are always recomputed; leave it out",
    "use-v2-block-manager": "there is one KV manager; leave it out",
    "use-v1": "there is one engine; leave it out",
    "num-scheduler-steps": "async scheduling replaced it and is on; leave it out",
    "best-of": "use n",
    "task": "use --runner and --convert",
    "lora-extra-vocab-size": "adapters cannot extend the vocabulary",
    "logits-processor-pattern": "processors belong to the engine, as plugins of the kind logits_processor",
    "guided-decoding-backend": "use --structured-outputs-config.backend",
    "speculative-model": "use --speculative-config.model (or --spec-model)",
    "num-speculative-tokens": "use --speculative-config.num_speculative_tokens (or --spec-tokens)",
    "disable-async-output-proc": "use --no-async-scheduling",
    "worker-use-ray": "use --distributed-executor-backend",
    "engine-use-ray": "use --distributed-executor-backend",
    "enable-lora-bias": "adapters have no bias",
    "disable-log-requests": "requests are not logged unless --enable-log-requests is given",
    "model-loader-extra-config": "options of a checkpoint format go into --plugin-config.NAME.key",
    "cuda-visible-devices": "use --device-ids",
    "enable-reasoning": "use --reasoning-parser",
    "max-seq-len-to-capture": "use --compilation-config.max_cudagraph_capture_size",
    "max-context-len-to-capture": "use --compilation-config.max_cudagraph_capture_size",
    "rope-scaling": "use --hf-overrides with rope_parameters",
    "rope-theta": "use --hf-overrides with rope_parameters",
    "logits-processor": "processors belong to the engine, as plugins of the kind logits_processor",
    "tokenizer-pool-size": "texts are tokenised in the front process; leave it out",
    "speculative-config.tensor-parallel-size": "use --speculative-config.draft_tensor_parallel_size",
}
"""Flag to what to do instead. Using one is an error."""

_LACKS = {
    "it has no adapters (LoRA); serve a checkpoint with the adapter merged into it": """enable-lora lora-modules lora-dtype
        max-loras max-lora-rank max-cpu-loras lora-target-modules fully-sharded-loras""",
    "it takes text only, no images, audio or video": """limit-mm-per-prompt media-io-kwargs mm-processor-kwargs
        mm-processor-cache-gb mm-processor-cache-type mm-encoder-tp-mode interleave-mm-strings language-model-only
        skip-mm-profiling video-pruning-rate allowed-local-media-path allowed-media-domains""",
    "one engine serves one address; start several servers behind a balancer": """api-server-count data-parallel-rank
        data-parallel-size-local data-parallel-address data-parallel-rpc-port data-parallel-backend
        data-parallel-hybrid-lb data-parallel-external-lb""",
    "one machine runs it all; use --tensor-parallel-size there": "nnodes node-rank master-addr master-port headless",
    "it has tensor parallelism only, for experts too; use --tensor-parallel-size": """enable-expert-parallel enable-eplb
        eplb-config expert-placement-strategy all2all-backend enable-dbo enable-elastic-ep decode-context-parallel-size
        prefill-context-parallel-size""",
    "weights stay on the device and the engine stays awake; end the server to free its memory": """cpu-offload-gb
        offload-backend offload-group-size enable-sleep-mode sleep-mode-backend""",
    "KV blocks stay in the engine; size the cache with --kv-cache-memory-bytes": """kv-offloading-size
        kv-offloading-backend ec-transfer-config""",
    "it speaks OpenAI's HTTP only": "grpc grpc-port enable-scale-out tokens-only tool-server",
    "it keeps no reports of single requests; see /metrics": """enable-log-outputs enable-mfu-metrics kv-cache-metrics
        otlp-traces-endpoint per-request-spec-decode-metrics""",
    "the budgets of a step are --max-num-batched-tokens and --max-num-seqs": """max-num-scheduled-tokens
        max-num-active-seqs max-num-partial-prefills scheduler-reserve-full-isl prefill-schedule-interval watermark""",
    "the queue is bounded by --max-num-queued-reqs": "max-num-queued-tokens",
    "prompts are text or token ids": "enable-prompt-embeds",
    "it generates text and pools nothing": "pooler-config",
    "it has no state-space caches": "mamba-block-size",
    "plugins bring such code, by entry point": "middleware tool-parser-plugin reasoning-parser-plugin",
    "it runs no logits processors, neither of the engine nor of a request": "logits-processors",
}

NOT_YET = {flag: reason for reason, names in _LACKS.items() for flag in names.split()}
"""Flags of the field that this release does not have, to what is missing or what to use."""

REMOVED_VALUES = {
    ("convert", "reward"): "use --convert embed",
    ("distributed-executor-backend", "ray"): "Ray is not used; use uni for one rank, mp for several",
}
"""Flag and value to what to do instead."""

NO_EFFECT = {
    "mamba-cache-mode": "the mode follows from prefix caching",
    "disable-cascade-attn": "attention over shared prefixes is chosen by measurement",
}
"""Flags that are accepted with a warning and change nothing."""
