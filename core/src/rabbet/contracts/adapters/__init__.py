"""Adapters: a class of the contract major before becomes one of today's. Each goes when its major is no longer served."""
