"""GGUF checkpoints: metadata, tokenizer, chat template and tensors of one file."""
