"""The workloads: prompts of random token ids and fixed output lengths, the same for every engine that is compared.

Needs nothing but the standard library, since it is also imported where only another engine is installed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["GPU_WORKLOADS", "WORKLOADS", "Workload"]

_NUM_HIGH_IDS = 300
"""The highest ids are left out: they are control tokens in many vocabularies."""


@dataclass(frozen=True)
class Workload:
    """Requests with uniform lengths; every request ignores the end token.

    Attributes:
        name: Key of the row.
        seed: Seed of lengths and ids.
        count: Number of requests, all there at the start.
        prompt_lens: Smallest and largest number of prompt tokens, without the shared prefix.
        output_lens: Smallest and largest number of tokens to generate.
        prefix_len: Tokens that all prompts share.
    """

    name: str
    seed: int
    count: int
    prompt_lens: tuple[int, int]
    output_lens: tuple[int, int]
    prefix_len: int = 0

    def make(self, vocab_size: int, repetition: int) -> tuple[list[list[int]], list[int]]:
        """Prompts and output lengths; lengths are the same in each repetition, ids are not.

        Other ids keep a prefix cache from helping across repetitions.
        """
        rng = random.Random(self.seed)
        highest = vocab_size - _NUM_HIGH_IDS
        prefix = [rng.randint(10, highest) for _ in range(self.prefix_len)]
        prompts = []
        for _ in range(self.count):
            length = self.prompt_lens[0] if self.prefix_len else rng.randint(*self.prompt_lens)
            prompts.append(prefix + [rng.randint(10, highest) for _ in range(length)])
        output_lens = [rng.randint(*self.output_lens) for _ in range(self.count)]
        return [[(token + 7 * repetition) % highest for token in prompt] for prompt in prompts], output_lens


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("single_128_1", 8, 1, (128, 128), (1, 1)),
        Workload("single_128_128", 8, 1, (128, 128), (128, 128)),
        Workload("batch8_1", 9, 8, (128, 128), (1, 1)),
        Workload("batch8_decode", 9, 8, (128, 128), (64, 64)),
        Workload("prefill_2000", 10, 1, (2000, 2000), (1, 1)),
        Workload("prefix_32x768", 11, 32, (32, 32), (16, 16), prefix_len=768),
        Workload("mixed_64", 7, 64, (64, 512), (32, 128)),
    )
}


GPU_WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("nano_256", 0, 256, (100, 1024), (100, 1024)),
        Workload("single_1024_1", 1, 1, (1024, 1024), (1, 1)),
        Workload("single_1024_256", 1, 1, (1024, 1024), (256, 256)),
        Workload("batch32_1", 2, 32, (128, 128), (1, 1)),
        Workload("batch32_decode", 2, 32, (128, 128), (256, 256)),
        Workload("mixed_512", 3, 512, (64, 1024), (64, 512)),
        Workload("batch256_decode", 5, 256, (128, 128), (128, 128)),
        Workload("prefill_64x4096", 4, 64, (4096, 4096), (1, 1)),
        Workload("prefix_256x2048", 6, 256, (32, 32), (32, 32), prefix_len=2048),
        Workload("long_8x30000", 12, 8, (30000, 30000), (256, 256)),
        Workload("long_8x30000_1", 12, 8, (30000, 30000), (1, 1)),
    )
}
