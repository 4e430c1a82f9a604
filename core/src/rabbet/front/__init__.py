"""Front ends: text in, text out. No torch."""
