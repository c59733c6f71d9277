"""Who may use the router: API keys and where they come from, names and sites that are let in."""
