"""Who may use the router: API keys and where they come from."""
