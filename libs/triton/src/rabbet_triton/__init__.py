"""What plugins with kernels in Triton share; a library, which registers nothing."""
