"""The gated delta rule (Qwen3-Next): chunks of a prompt, and one step of decode rows."""
