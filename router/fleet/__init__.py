"""All servers of a router: which there are, which of them serve a model, what the router knows of them."""
