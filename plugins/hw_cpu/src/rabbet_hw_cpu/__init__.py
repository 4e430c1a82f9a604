"""CPUs: the platform, paged attention, dense linear layers and small fused operations."""
