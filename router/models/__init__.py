"""What the router knows of a model: names, tokenizer, chat template, grammars, prompts."""
