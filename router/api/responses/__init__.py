"""OpenAI's Responses API: items in, items out, and a store of responses that can be continued."""
