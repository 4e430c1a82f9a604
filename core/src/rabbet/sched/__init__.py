"""Which tokens are computed in each step. No torch."""
