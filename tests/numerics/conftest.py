"""The real model, once a session: SmolLM2 in float32, and what transformers' generate says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NUM_PROMPTS = 20
NUM_NEW_TOKENS = 64
QUESTIONS = [
    "What is the capital of France?", "Explain gravity to a child.", "Write a haiku about rain.", "Who wrote Hamlet?",
    "List three uses of salt.", "How do vaccines work?", "What is 17 plus 25?", "Name the planets of the solar system.",
    "Give me a recipe for pancakes.", "Why is the sky blue?", "What does a compiler do?", "Tell a short story about a fox.",
    "How do I boil an egg?", "What is photosynthesis?", "Translate 'good morning' into Spanish.", "What is a prime number?",
    "Describe the taste of an apple.", "How far away is the moon?", "What causes tides?", "Suggest a name for a black cat.",
]  # fmt: skip


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a Hugging Face directory in float32, so that both engines read the same bytes."""
    import torch
    from rabbet_weights_gguf.format import GGUFFormat
    from safetensors.torch import save_file

    from rabbet.contracts.weights import ResolveQuery

    files = GGUFFormat.resolve(ResolveQuery(model="smollm2"))
    directory = tmp_path_factory.mktemp("smollm2")
    tensors = {name: tensor.to(torch.float32).contiguous() for name, tensor in GGUFFormat.tensors(files)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**files.config, "dtype": "float32"}))
    (directory / "generation_config.json").write_text(json.dumps(dict(files.generation_config)))
    assert files.tokenizer_dir is not None
    for path in files.tokenizer_dir.iterdir():
        if path.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            (directory / path.name).write_bytes(path.read_bytes())
    return directory


@pytest.fixture(scope="session")
def questions() -> list[str]:
    """What the prompts ask."""
    return QUESTIONS


@pytest.fixture(scope="session")
def prompts(model_dir: Path) -> list[list[int]]:
    """20 chat prompts as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        for question in QUESTIONS
    ]
    assert len(rendered) == NUM_PROMPTS
    return rendered


@pytest.fixture(scope="session")
def expected(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers' generate, all prompts in one batch, filled up at their left."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    # One thread: threads that wait for each other in a loop come to a crawl when the machine has other work.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    torch.set_num_threads(num_threads)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [_until(row[longest:].tolist(), ends) for row in found]


def _until(tokens: list[int], ends: list[int]) -> list[int]:
    """Up to the first end token: the rest of a batch's row is filling."""
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tokens[: places[0] + 1] if places else tokens
