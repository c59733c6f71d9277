"""OpenAI's API: completions, chat completions, models; and vLLM's tokenization."""
