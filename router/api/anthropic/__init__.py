"""The API of Anthropic's clients, ``/v1/messages``. It translates each request into a chat."""
