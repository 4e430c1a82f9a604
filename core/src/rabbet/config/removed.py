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
    "speculative-config.tensor-parallel-size": "use --speculative-config.draft_tensor_parallel_size",
}
"""Flag to what to do instead. Using one is an error."""

NOT_YET = (
    "api-server-count", "cpu-offload-gb", "data-parallel-address", "data-parallel-rank", "data-parallel-size-local",
    "enable-eplb", "enable-expert-parallel", "enable-lora", "enable-prompt-embeds", "enable-sleep-mode", "grpc",
    "grpc-port", "headless", "logits-processors", "lora-modules", "master-addr", "master-port", "max-loras", "middleware",
    "nnodes", "node-rank", "tool-server",
)  # fmt: skip
"""Flags of the field that mean something, but that this release does not have."""

REMOVED_VALUES = {("convert", "reward"): "use --convert embed"}
"""Flag and value to what to do instead."""

NO_EFFECT = {
    "mamba-cache-mode": "the mode follows from prefix caching",
    "disable-cascade-attn": "attention over shared prefixes is chosen by measurement",
}
"""Flags that are accepted with a warning and change nothing."""
