"""The plan of one step: what the scheduler tells the model runner, and all that it tells it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rabbet.types.sampling import SamplingParams

__all__ = ["NewRequest", "RunningRequest", "StepPlan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRequest:
    """A request that the runner has no row for: it is new, or it comes back after a preemption.

    Attributes:
        request_id: The engine's id.
        token_ids: Every known token: the prompt, then what was generated before a preemption.
        num_prompt_tokens: How many of them are the prompt.
        num_computed_tokens: How many have their KV in the cache already (prefix hits, connector loads).
        block_ids: For each cache group, the block of each ``block_size`` tokens, from position 0.
        sampling: How its tokens are chosen.
        seed: The seed to use: the caller's, or one drawn by the engine. The draw of output token i depends on
            the seed and on i alone, so neither the batch nor a preemption changes it.
        end_token_ids: End token and stop ids, masked until ``min_tokens`` is reached; empty if ignored.
        bad_words_token_ids: Token sequences whose last token must not be generated.
        adapter: Name of the adapter, or None.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[list[int]]
    sampling: SamplingParams
    seed: int
    end_token_ids: list[int] = field(default_factory=list)
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningRequest:
    """A request that the runner knows.

    Attributes:
        request_id: The engine's id.
        num_computed_tokens: Tokens whose KV is in the cache when this step starts. With async scheduling and
            drafts it assumes that all drafts of the step before were accepted; the runner keeps the true count.
        new_block_ids: For each cache group, the blocks appended since the last plan.
    """

    request_id: str
    num_computed_tokens: int
    new_block_ids: list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step.

    With async scheduling a plan is made before the result of the step before it is known. The runner executes
    plans in order and writes each sampled token into its own row, so a plan never carries sampled tokens of a
    running request. A request samples in this step iff its computed and scheduled tokens reach the last token
    that the runner's row knows.

    Attributes:
        step_id: Counts up from 1.
        new_requests: Requests to make rows for.
        running_requests: Requests with rows.
        num_scheduled_tokens: Request id to number of tokens of this step, drafts included; > 0. Its order is
            the order of the batch.
        draft_token_ids: Drafts to verify: they are the last scheduled tokens of the request.
        finished_request_ids: Requests whose rows can go: finished, aborted, or preempted since the last plan.
        grammar_request_ids: Requests whose logits a grammar masks, in bitmask row order.
        kv_transfer: What the scheduler half of the KV connector tells its worker half.
    """

    step_id: int
    new_requests: list[NewRequest] = field(default_factory=list)
    running_requests: list[RunningRequest] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    finished_request_ids: list[str] = field(default_factory=list)
    grammar_request_ids: list[str] = field(default_factory=list)
    kv_transfer: bytes | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.num_scheduled_tokens.values())
