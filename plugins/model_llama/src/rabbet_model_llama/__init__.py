"""Llama and the models that share its form: Mistral, SmolLM2."""
