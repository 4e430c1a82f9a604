"""Independent computations that plugins are held against: float64, byte level, brute force."""
