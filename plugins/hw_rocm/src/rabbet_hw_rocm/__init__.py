"""AMD GPUs as a hardware platform."""
