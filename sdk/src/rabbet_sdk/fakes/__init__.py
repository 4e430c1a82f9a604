"""Stand-ins that tests of plugins and of core use: distributions, clocks, platforms, models, stores."""
