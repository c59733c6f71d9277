"""An OpenAI endpoint as its client sees it: `twinfang batch`, `chat` and `complete` share it.

| module | is |
|---|---|
| `flags.py` | the flags that name an endpoint |
| `endpoint.py` | base URL, API key, and HTTP clients for both |
| `model_list.py` | which models the endpoint serves, and whether it is a router of ours |
| `refusal.py` | what an answer that is no success says |
"""
