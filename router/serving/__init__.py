"""One request on its way: its choices, their dispatch to servers, and the answers that come back."""
