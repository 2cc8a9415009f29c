"""Which strategy, and why: pure values in and out. No clock, no process, no device."""
