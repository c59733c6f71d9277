"""OpenAI's APIs for completions, chat completions and models; and vLLM's API for tokenization."""
