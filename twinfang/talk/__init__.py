"""``twinfang chat`` and ``twinfang complete``: talk to an OpenAI endpoint from a terminal.

| module | is |
|---|---|
| `command.py`, `flags.py` | the two commands and their flags |
| `conversation.py` | a chat: what was said so far, and what a person types |
| `completion.py` | texts to continue, each for itself |
| `answer_stream.py` | one streamed answer, piece by piece |
| `terminal.py` | what is shown, how it looks, and what is typed |
"""
