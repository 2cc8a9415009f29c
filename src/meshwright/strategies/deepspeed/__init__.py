"""`engine=deepspeed`: the same strategies on the DeepSpeed package, which is imported here only, and when asked for."""
