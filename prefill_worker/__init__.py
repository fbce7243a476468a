"""The prefill role: computes prompts and ships their KV."""
